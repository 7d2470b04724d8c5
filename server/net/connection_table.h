// SPDX-License-Identifier: Apache-2.0
//
// Which connections there are, of whom, and whether there is room for another. Pure: it opens and
// closes nothing. Whoever takes a connection over does not say when it closes it, so a descriptor
// is remembered with its socket's inode, and Sweep forgets what is no longer open. Not thread-safe.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>

#include "server/util/clock.h"

namespace attend {

class ConnectionTable {
 public:
  enum class Room { kFree, kFull, kPeerFull };
  struct Connection {
    int fd = -1;
    ino_t inode = 0;
    std::string peer;  // who counts as one
  };
  // True if the descriptor is still that socket.
  using IsOpen = std::function<bool(int fd, ino_t inode)>;

  ConnectionTable(int64_t connections_max, int64_t per_peer_max)
      : connections_max_(connections_max), per_peer_max_(per_peer_max) {}

  Room RoomFor(const std::string& peer) const;
  // A connection that has said nothing so far. Whatever had its descriptor before is gone.
  void Add(const Connection& connection, TimePoint now);
  void Spoke(int fd);  // it has said something, and is another's from now on
  void Remove(int fd);
  bool IsSilent(int fd) const;  // it is here and has said nothing
  // Forgets those that are another's and closed.
  void Sweep(const IsOpen& is_open);

  // The one that has been silent for longest: of all, or of `peer`.
  std::optional<int> OldestSilent() const;
  std::optional<int> OldestSilent(const std::string& peer) const;
  // Since when that one of all has been here; kNever if none is silent.
  TimePoint OldestSilentSince() const;

  int64_t size() const { return static_cast<int64_t>(connections_.size()); }

 private:
  using Order = std::map<uint64_t, int>;  // descriptors by arrival
  struct Entry {
    ino_t inode = 0;
    std::string peer;
    TimePoint since;
    uint64_t arrival = 0;
    bool silent = true;
  };
  struct Peer {
    int64_t connections = 0;
    Order silent;
  };

  static std::optional<int> First(const Order& order);

  const int64_t connections_max_;
  const int64_t per_peer_max_;
  uint64_t arrivals_ = 0;
  std::unordered_map<int, Entry> connections_;  // by descriptor
  std::unordered_map<std::string, Peer> peers_;
  Order silent_;
};

}  // namespace attend
