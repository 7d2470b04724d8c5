// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_table.h"

#include <vector>

namespace attend {

ConnectionTable::Room ConnectionTable::RoomFor(const std::string& peer) const {
  const auto found = peers_.find(peer);
  if (found != peers_.end() && found->second.connections >= per_peer_max_) return Room::kPeerFull;
  return size() >= connections_max_ ? Room::kFull : Room::kFree;
}

void ConnectionTable::Add(const Connection& connection, TimePoint now) {
  Remove(connection.fd);
  const uint64_t arrival = arrivals_++;
  Peer& peer = peers_[connection.peer];
  ++peer.connections;
  try {
    peer.silent[arrival] = connection.fd;
    silent_[arrival] = connection.fd;
    connections_[connection.fd] = {connection.inode, connection.peer, now, arrival, true};
  } catch (...) {  // no memory: as it was
    connections_.erase(connection.fd);
    silent_.erase(arrival);
    peer.silent.erase(arrival);
    if (--peer.connections == 0) peers_.erase(connection.peer);
    throw;
  }
}

void ConnectionTable::Spoke(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end() || !found->second.silent) return;
  found->second.silent = false;
  silent_.erase(found->second.arrival);
  peers_[found->second.peer].silent.erase(found->second.arrival);
}

void ConnectionTable::Remove(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  Spoke(fd);
  const auto peer = peers_.find(found->second.peer);
  if (--peer->second.connections == 0) peers_.erase(peer);
  connections_.erase(found);
}

bool ConnectionTable::IsSilent(int fd) const {
  const auto found = connections_.find(fd);
  return found != connections_.end() && found->second.silent;
}

void ConnectionTable::Sweep(const IsOpen& is_open) {
  std::vector<int> closed;
  for (const auto& [fd, entry] : connections_) {
    if (!entry.silent && !is_open(fd, entry.inode)) closed.push_back(fd);
  }
  for (const int fd : closed) Remove(fd);
}

std::optional<int> ConnectionTable::First(const Order& order) {
  if (order.empty()) return std::nullopt;
  return order.begin()->second;
}

std::optional<int> ConnectionTable::OldestSilent() const { return First(silent_); }

std::optional<int> ConnectionTable::OldestSilent(const std::string& peer) const {
  const auto found = peers_.find(peer);
  return found == peers_.end() ? std::nullopt : First(found->second.silent);
}

TimePoint ConnectionTable::OldestSilentSince() const {
  const std::optional<int> fd = OldestSilent();
  return fd ? connections_.at(*fd).since : kNever;
}

}  // namespace attend
