// SPDX-License-Identifier: Apache-2.0
//
// The open connections by peer, and whether there is room for another. Pure: it opens and closes
// nothing. A connection that was handed over is closed without notice, so each descriptor is stored
// with its socket's inode, and Sweep removes those that are no longer open. Not thread-safe.
//
// A connection is silent until its first byte, then in use. Where calls need credentials, a
// connection in use is a stranger until a call with a valid credential has been accepted on it, and
// again once none of the credentials accepted on it is valid any more.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
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
  struct Connection {
    int fd = -1;
    ino_t inode = 0;
    std::string peer;  // see PeerOf in peer.h
  };
  // True if the descriptor still refers to that socket.
  using IsOpen = std::function<bool(int fd, ino_t inode)>;

  // At most this many ended but not yet closed connections count as free places.
  static constexpr int64_t kEndingMax = 32;
  // A stranger that sends this many message bytes within its time gets the same time again: a
  // caller's first message may be long. So does one with an open health watch, which needs no
  // credential and is all that an idle client may have.
  static constexpr int64_t kStrangerBytes = int64_t{64} << 10;

  ConnectionTable(int64_t connections_max, int64_t per_peer_max)
      : connections_max_(connections_max), per_peer_max_(per_peer_max) {}

  Room RoomFor(const std::string& peer) const;
  // Adds a silent connection. An earlier one with this descriptor has been closed and is removed.
  void Add(const Connection& connection, TimePoint now);
  void Spoke(int fd);  // it has sent its first byte and is handed over
  // The connection handed over is in use from now on, as a stranger if `use` has marks.
  void Begin(int fd, std::shared_ptr<const ConnectionUse> use, TimePoint now);
  // A connection in use has been ended and will be closed soon.
  void End(int fd);
  void Remove(int fd);
  bool IsSilent(int fd) const;  // it is in the table and has sent nothing
  // Removes connections that were handed over and have been closed.
  void Sweep(const IsOpen& is_open);

  // The connection that has been silent for longest, in total or of `peer`.
  std::optional<int> OldestSilent() const;
  std::optional<int> OldestSilent(const std::string& peer) const;
  // When OldestSilent() arrived; kNever if none is silent.
  TimePoint OldestSilentSince() const;

  struct Stranger {
    int fd = -1;
    ino_t inode = 0;
    TimePoint since;
    bool stays = false;  // it sends enough, or watches health, and deserves Renew
  };
  // The connection that has been a stranger for longest, in total or of `peer`.
  std::optional<Stranger> OldestStranger();
  std::optional<Stranger> OldestStranger(const std::string& peer);
  void Renew(int fd, TimePoint now);
  void RenewStrangers(TimePoint now);
  // Connections whose credentials have all become invalid are strangers again from now on.
  void FindStrangers(TimePoint now);

  struct InUse {
    int fd = -1;
    ino_t inode = 0;
  };
  // Connections on which a message has stalled for `timeout`.
  std::vector<InUse> Stalled(TimePoint now, Duration timeout) const;
  // Restarts the timeout of all unfinished messages.
  void RestartMessages(TimePoint now) const;
  // Connections to end so that unfinished messages hold at most `most` bytes: repeatedly the
  // largest connection of the peer that holds most.
  std::vector<InUse> Largest(int64_t most) const;
  // Whether ending another stranger would make room where `room` is full.
  bool MayEnd(Room room, const std::string& peer) const;

  int64_t size() const { return all_.connections; }

 private:
  using Order = std::map<uint64_t, int>;  // arrival number to descriptor
  struct Entry {
    ino_t inode = 0;
    std::string peer;
    TimePoint since;
    uint64_t arrival = 0;
    bool silent = true;
    bool ending = false;
    std::shared_ptr<const ConnectionUse> use;  // null: silent or ending
    int64_t data_bytes = 0;                    // at the time of Renew
  };
  // All connections, or those of one peer.
  struct Set {
    int64_t connections = 0;
    int64_t ending = 0;
    Order silent;
    Order strangers;
  };

  static std::optional<int> First(const Order& order);
  static bool IsFull(const Set& set, int64_t most);
  std::optional<Stranger> OldestStrangerOf(const Set& set);
  void Queue(int fd, Entry& entry);
  void Dequeue(Entry& entry);

  const int64_t connections_max_;
  const int64_t per_peer_max_;
  uint64_t arrivals_ = 0;
  std::unordered_map<int, Entry> connections_;  // by descriptor
  std::unordered_map<std::string, Set> peers_;
  Set all_;
};

}  // namespace attend
