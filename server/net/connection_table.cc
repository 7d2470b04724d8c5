// SPDX-License-Identifier: Apache-2.0
//
// Silent connections and strangers each have two queues ordered by arrival number, one in total and
// one of their peer, so the oldest is found in O(log n). Invariant: a connection is in both queues
// of its kind or in neither. The strangers' queues are lazy: a connection on which a call was
// accepted stays there until OldestStrangerOf meets it, because calls are accepted on other
// threads, which only set an atomic mark.

#include "server/net/connection_table.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace attend {

bool ConnectionTable::IsFull(const Set& set, int64_t most) {
  return set.connections - std::min(set.ending, kEndingMax) >= most;
}

ConnectionTable::Room ConnectionTable::RoomFor(const std::string& peer) const {
  const auto found = peers_.find(peer);
  if (found != peers_.end() && IsFull(found->second, per_peer_max_)) return Room::kPeerFull;
  return IsFull(all_, connections_max_) ? Room::kFull : Room::kFree;
}

void ConnectionTable::Add(const Connection& connection, TimePoint now) {
  Remove(connection.fd);
  Entry entry;
  entry.inode = connection.inode;
  entry.peer = connection.peer;
  entry.since = now;
  entry.arrival = arrivals_++;
  const uint64_t arrival = entry.arrival;
  Set& peer = peers_[connection.peer];
  try {
    peer.silent[arrival] = connection.fd;
    all_.silent[arrival] = connection.fd;
    connections_[connection.fd] = std::move(entry);
  } catch (...) {  // out of memory: undo
    connections_.erase(connection.fd);
    all_.silent.erase(arrival);
    peer.silent.erase(arrival);
    if (peer.connections == 0) peers_.erase(connection.peer);
    throw;
  }
  ++peer.connections;
  ++all_.connections;
}

void ConnectionTable::Spoke(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end() || !found->second.silent) return;
  found->second.silent = false;
  all_.silent.erase(found->second.arrival);
  peers_[found->second.peer].silent.erase(found->second.arrival);
}

void ConnectionTable::Begin(int fd, std::shared_ptr<const ConnectionUse> use, TimePoint now) {
  const auto found = connections_.find(fd);
  if (found == connections_.end() || use == nullptr) return;
  found->second.use = std::move(use);
  if (found->second.use->marks != nullptr) Renew(fd, now);
}

void ConnectionTable::Renew(int fd, TimePoint now) {
  Entry& entry = connections_.at(fd);
  Dequeue(entry);
  entry.since = now;
  entry.arrival = arrivals_++;
  entry.data_bytes = entry.use->data_bytes.load(std::memory_order_relaxed);
  Queue(fd, entry);
}

void ConnectionTable::RenewStrangers(TimePoint now) {
  const Order strangers = all_.strangers;
  for (const auto& [arrival, fd] : strangers) Renew(fd, now);
}

void ConnectionTable::Queue(int fd, Entry& entry) {
  Order& strangers = peers_[entry.peer].strangers;
  strangers[entry.arrival] = fd;
  try {
    all_.strangers[entry.arrival] = fd;
  } catch (...) {
    strangers.erase(entry.arrival);
    throw;
  }
}

void ConnectionTable::Dequeue(Entry& entry) {
  all_.strangers.erase(entry.arrival);
  peers_[entry.peer].strangers.erase(entry.arrival);
}

void ConnectionTable::End(int fd) {
  Entry& entry = connections_.at(fd);
  Dequeue(entry);
  entry.use = nullptr;
  entry.ending = true;
  ++all_.ending;
  ++peers_[entry.peer].ending;
}

void ConnectionTable::Remove(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  Spoke(fd);
  Entry& entry = found->second;
  Dequeue(entry);
  const auto peer = peers_.find(entry.peer);
  for (Set* const set : {&all_, &peer->second}) {
    --set->connections;
    if (entry.ending) --set->ending;
  }
  if (peer->second.connections == 0) peers_.erase(peer);
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

std::optional<int> ConnectionTable::OldestSilent() const { return First(all_.silent); }

std::optional<int> ConnectionTable::OldestSilent(const std::string& peer) const {
  const auto found = peers_.find(peer);
  return found == peers_.end() ? std::nullopt : First(found->second.silent);
}

TimePoint ConnectionTable::OldestSilentSince() const {
  const std::optional<int> fd = OldestSilent();
  return fd ? connections_.at(*fd).since : kNever;
}

std::optional<ConnectionTable::Stranger> ConnectionTable::OldestStrangerOf(const Set& set) {
  while (const std::optional<int> fd = First(set.strangers)) {
    Entry& entry = connections_.at(*fd);
    if (!entry.use->marks->called.load(std::memory_order_relaxed)) {
      const int64_t sent = entry.use->data_bytes.load(std::memory_order_relaxed) - entry.data_bytes;
      const bool watches = entry.use->marks->watches.load(std::memory_order_relaxed) > 0;
      return Stranger{*fd, entry.inode, entry.since, watches || sent >= kStrangerBytes};
    }
    Dequeue(entry);  // a call has been accepted on it since
  }
  return std::nullopt;
}

std::optional<ConnectionTable::Stranger> ConnectionTable::OldestStranger() {
  return OldestStrangerOf(all_);
}

std::optional<ConnectionTable::Stranger> ConnectionTable::OldestStranger(const std::string& peer) {
  const auto found = peers_.find(peer);
  return found == peers_.end() ? std::nullopt : OldestStrangerOf(found->second);
}

void ConnectionTable::FindStrangers(TimePoint now) {
  for (const auto& [fd, entry] : connections_) {
    if (entry.use == nullptr || entry.use->marks == nullptr) continue;
    if (entry.use->marks->called.load(std::memory_order_relaxed)) continue;
    if (!all_.strangers.contains(entry.arrival)) Renew(fd, now);
  }
}

std::vector<ConnectionTable::InUse> ConnectionTable::Stalled(TimePoint now,
                                                             Duration timeout) const {
  std::vector<InUse> stalled;
  for (const auto& [fd, entry] : connections_) {
    if (entry.use == nullptr || !entry.use->messages->Stall(now, timeout)) continue;
    stalled.push_back({fd, entry.inode});
  }
  return stalled;
}

void ConnectionTable::RestartMessages(TimePoint now) const {
  for (const auto& [fd, entry] : connections_) {
    if (entry.use != nullptr) entry.use->messages->Restart(now);
  }
}

std::vector<ConnectionTable::InUse> ConnectionTable::Largest(int64_t most) const {
  struct Holder {
    InUse connection;
    int64_t bytes = 0;
  };
  struct Peer {
    int64_t bytes = 0;
    std::vector<Holder> holders;
  };
  const auto less = [](const auto& a, const auto& b) { return a.bytes < b.bytes; };
  std::unordered_map<std::string_view, size_t> places;
  std::vector<Peer> peers;
  int64_t all = 0;
  for (const auto& [fd, entry] : connections_) {
    const int64_t bytes = entry.use == nullptr ? 0 : entry.use->Held();
    if (bytes == 0) continue;
    const size_t place = places.try_emplace(entry.peer, peers.size()).first->second;
    if (place == peers.size()) peers.emplace_back();
    peers[place].holders.push_back({{fd, entry.inode}, bytes});
    peers[place].bytes += bytes;
    all += bytes;
  }
  std::vector<InUse> largest;
  while (all > most) {
    Peer& peer = *std::max_element(peers.begin(), peers.end(), less);
    Holder& holder = *std::max_element(peer.holders.begin(), peer.holders.end(), less);
    largest.push_back(holder.connection);
    all -= holder.bytes;
    peer.bytes -= std::exchange(holder.bytes, 0);
  }
  return largest;
}

bool ConnectionTable::MayEnd(Room room, const std::string& peer) const {
  if (room != Room::kPeerFull) return all_.ending < kEndingMax;
  const auto found = peers_.find(peer);
  return found == peers_.end() || found->second.ending < kEndingMax;
}

}  // namespace attend
