// SPDX-License-Identifier: Apache-2.0
//
// The open connections by peer, and whether there is room for another. Pure: it opens and closes
// nothing. Connections are closed by others: Sweep removes those whose use has ended. Not
// thread-safe.
//
// A connection is a stranger until its first HTTP/2 frame. Where calls need credentials, it is one
// until a call with a valid credential has been accepted on it, and again once none of the
// credentials accepted on it is valid any more.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/util/clock.h"
#include "server/net/connection_use.h"

namespace attend {

class ConnectionTable {
 public:
  enum class Room { kFree, kFull, kPeerFull };

  // At most this many ended but not yet closed connections count as free places.
  static constexpr int64_t kEndingMax = 32;
  // A stranger that sends this many message bytes within its time gets the same time again: a
  // caller's first message may be long. So does one with an open health watch, which needs no
  // credential and is all that an idle client may have.
  static constexpr int64_t kStrangerBytes = int64_t{64} << 10;

  ConnectionTable(int64_t connections_max, int64_t per_peer_max)
      : connections_max_(connections_max), per_peer_max_(per_peer_max) {}

  Room RoomFor(const std::string& peer) const;
  // Adds a stranger of the peer (PeerOf in peer.h). An earlier connection with this descriptor has
  // been closed and is removed.
  void Add(int fd, const std::string& peer, std::shared_ptr<const ConnectionUse> use,
           TimePoint now);
  // The connection is going to be ended, and will be closed soon. Returns its use.
  std::shared_ptr<const ConnectionUse> End(int fd);
  void Remove(int fd);
  // Removes connections that have been closed: all of them, or those that were ended. The latter is
  // cheap, and returns whether there were any.
  void Sweep();
  bool SweepEnded();

  struct Stranger {
    int fd = -1;
    TimePoint since;
    bool silent = false;  // no frame has come
    bool stays = false;   // it sends enough, or watches health, and deserves Renew
  };
  // The connection that has been a stranger for longest, in total or of `peer`.
  std::optional<Stranger> OldestStranger();
  std::optional<Stranger> OldestStranger(const std::string& peer);
  void Renew(int fd, TimePoint now);
  void RenewStrangers(TimePoint now);
  // Connections whose credentials have all become invalid are strangers again from now on.
  void FindStrangers(TimePoint now);

  // Connections to end so that unfinished messages hold at most `most` bytes: repeatedly the
  // largest connection of the peer that holds most.
  std::vector<int> Largest(int64_t most) const;
  // Whether there can be room for another connection, after ending a stranger if need be. If not,
  // some of those that were ended must be closed first.
  bool MayAdd() const { return !IsFull() || all_.ending < kEndingMax; }

  int64_t size() const { return all_.connections; }

 private:
  using Order = std::map<uint64_t, int>;  // arrival number to descriptor
  struct Entry {
    std::string peer;
    TimePoint since = {};
    uint64_t arrival = 0;  // 0: never queued
    bool ending = false;
    std::shared_ptr<const ConnectionUse> use = {};
    int64_t data_bytes = 0;  // at the time of Renew
  };
  // All connections, or those of one peer.
  struct Set {
    int64_t connections = 0;
    int64_t ending = 0;
    Order strangers;
  };

  bool IsFull() const;
  std::optional<Stranger> OldestStrangerOf(const Set& set);
  void Dequeue(Entry& entry);

  const int64_t connections_max_;
  const int64_t per_peer_max_;
  uint64_t arrivals_ = 0;
  std::unordered_map<int, Entry> connections_;  // by descriptor
  std::vector<int> ended_;                      // descriptors of those that are ending
  std::unordered_map<std::string, Set> peers_;
  Set all_;
};

}  // namespace attend
