// SPDX-License-Identifier: Apache-2.0
//
// The open connections and their peers, and whether there is room for another. Pure: it opens and
// closes nothing. Once handed over, a connection is closed without notice, so a descriptor is
// stored with its socket's inode, and Sweep forgets what is no longer open. Not thread-safe.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>

#include "kernels/util/clock.h"

namespace attend {

class ConnectionTable {
 public:
  enum class Room { kFree, kFull, kPeerFull };
  struct Connection {
    int fd = -1;
    ino_t inode = 0;
    std::string peer;  // see PeerOf in listener.h
  };
  // True if the descriptor still refers to that socket.
  using IsOpen = std::function<bool(int fd, ino_t inode)>;

  ConnectionTable(int64_t connections_max, int64_t per_peer_max)
      : connections_max_(connections_max), per_peer_max_(per_peer_max) {}

  Room RoomFor(const std::string& peer) const;
  // Adds a connection that has sent nothing so far. Any earlier one with its descriptor is gone.
  void Add(const Connection& connection, TimePoint now);
  void Spoke(int fd);  // it has sent something, and is handed over
  void Remove(int fd);
  bool IsSilent(int fd) const;  // it is here and has sent nothing
  // Forgets connections that were handed over and are closed.
  void Sweep(const IsOpen& is_open);

  // The connection that has been silent for longest: of all, or of `peer`.
  std::optional<int> OldestSilent() const;
  std::optional<int> OldestSilent(const std::string& peer) const;
  // Since when the oldest silent one of all has been here; kNever if none is silent.
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
