// SPDX-License-Identifier: Apache-2.0
//
// The open connections and their peers, and whether there is room for another. Pure: it opens and
// closes nothing. Once handed over, a connection is closed without notice, so a descriptor is
// stored with its socket's inode, and Sweep forgets what is no longer open. Not thread-safe.
//
// A connection is silent until it has sent something, and then in use. Where calls need credentials
// it is a stranger's, until a call of a caller's has been let in on it, and again once who called
// is none.

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

  // So many connections that were ended and are not closed yet have already made room for others.
  static constexpr int64_t kEndingMax = 32;
  // A stranger that sends so much of messages in the time that it has gets as much time again: the
  // first message of a caller may be long. So does one that watches health: callers who have
  // nothing to ask do that, without credentials.
  static constexpr int64_t kStrangerBytes = int64_t{64} << 10;

  ConnectionTable(int64_t connections_max, int64_t per_peer_max)
      : connections_max_(connections_max), per_peer_max_(per_peer_max) {}

  Room RoomFor(const std::string& peer) const;
  // Adds a connection that has sent nothing so far. Any earlier one with its descriptor is gone.
  void Add(const Connection& connection, TimePoint now);
  void Spoke(int fd);  // it has sent something, and is handed over
  // What was handed over is in use from now on; a stranger's, if the use has marks.
  void Begin(int fd, std::shared_ptr<const ConnectionUse> use, TimePoint now);
  // One in use has been ended, and is closed soon.
  void End(int fd);
  void Remove(int fd);
  bool IsSilent(int fd) const;  // it is here and has sent nothing
  // Forgets connections that were handed over and are closed.
  void Sweep(const IsOpen& is_open);

  // The connection that has been silent for longest: of all, or of `peer`.
  std::optional<int> OldestSilent() const;
  std::optional<int> OldestSilent(const std::string& peer) const;
  // Since when the oldest silent one of all has been here; kNever if none is silent.
  TimePoint OldestSilentSince() const;

  struct Stranger {
    int fd = -1;
    ino_t inode = 0;
    TimePoint since;
    bool stays = false;  // it sends enough, or watches health, to be given more time: see Renew
  };
  // The stranger that has been here for longest: of all, or of `peer`.
  std::optional<Stranger> OldestStranger();
  std::optional<Stranger> OldestStranger(const std::string& peer);
  void Renew(int fd, TimePoint now);
  void RenewStrangers(TimePoint now);  // all
  // Those on which nobody calls any more, by their use, are strangers' again from now on.
  void FindStrangers(TimePoint now);

  struct InUse {
    int fd = -1;
    ino_t inode = 0;
  };
  // Those on which a message has stalled for so long.
  std::vector<InUse> Stalled(TimePoint now, Duration timeout) const;
  // All messages have their time anew.
  void RestartMessages(TimePoint now) const;
  // Those without which unfinished messages take no more than `most`: always the one that takes
  // most, of the peer that does.
  std::vector<InUse> Largest(int64_t most) const;
  // Whether another stranger's end would make room where `room` is full.
  bool MayEnd(Room room, const std::string& peer) const;

  int64_t size() const { return all_.connections; }

 private:
  using Order = std::map<uint64_t, int>;  // descriptors by arrival
  struct Entry {
    ino_t inode = 0;
    std::string peer;
    TimePoint since;
    uint64_t arrival = 0;
    bool silent = true;
    bool ending = false;
    std::shared_ptr<const ConnectionUse> use;  // null: it is silent, or ending
    int64_t data_bytes = 0;                    // of a stranger's, when its time began
  };
  // All connections, or one peer's.
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
