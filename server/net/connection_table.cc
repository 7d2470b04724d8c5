// SPDX-License-Identifier: Apache-2.0
//
// Strangers have two queues ordered by arrival number, one in total and one of their peer, so the
// oldest is found in O(log n). Invariant: a connection is in both queues or in neither. The queues
// are lazy: a connection that is no stranger any more stays there until OldestStrangerOf meets it,
// because frames and calls come on other threads, which only set an atomic mark.

#include "server/net/connection_table.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace attend {

bool ConnectionTable::IsFull() const {
  return all_.connections - std::min(all_.ending, kEndingMax) >= connections_max_;
}

ConnectionTable::Room ConnectionTable::RoomFor(const std::string& peer) const {
  const auto found = peers_.find(peer);
  if (found != peers_.end() && found->second.connections - found->second.ending >= per_peer_max_) {
    return Room::kPeerFull;
  }
  return IsFull() ? Room::kFull : Room::kFree;
}

void ConnectionTable::Add(int fd, const std::string& peer, std::shared_ptr<const ConnectionUse> use,
                          TimePoint now) {
  Remove(fd);
  Set& set = peers_[peer];
  connections_[fd] = {.peer = peer, .use = std::move(use)};
  ++set.connections;
  ++all_.connections;
  Renew(fd, now);
}

void ConnectionTable::Renew(int fd, TimePoint now) {
  Entry& entry = connections_.at(fd);
  Dequeue(entry);
  entry.since = now;
  entry.arrival = ++arrivals_;
  entry.data_bytes = entry.use->data_bytes.load(std::memory_order_relaxed);
  all_.strangers[entry.arrival] = peers_[entry.peer].strangers[entry.arrival] = fd;
}

void ConnectionTable::RenewStrangers(TimePoint now) {
  const Order strangers = all_.strangers;
  for (const auto& [arrival, fd] : strangers) Renew(fd, now);
}

void ConnectionTable::Dequeue(Entry& entry) {
  all_.strangers.erase(entry.arrival);
  peers_[entry.peer].strangers.erase(entry.arrival);
}

std::shared_ptr<const ConnectionUse> ConnectionTable::End(int fd) {
  Entry& entry = connections_.at(fd);
  ended_.push_back(fd);
  Dequeue(entry);
  entry.ending = true;
  ++all_.ending;
  ++peers_[entry.peer].ending;
  return entry.use;
}

void ConnectionTable::Remove(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  Entry& entry = found->second;
  Dequeue(entry);
  if (entry.ending) std::erase(ended_, fd);
  const auto peer = peers_.find(entry.peer);
  for (Set* const set : {&all_, &peer->second}) {
    --set->connections;
    if (entry.ending) --set->ending;
  }
  if (peer->second.connections == 0) peers_.erase(peer);
  connections_.erase(found);
}

void ConnectionTable::Sweep() {
  std::vector<int> closed;
  for (const auto& [fd, entry] : connections_) {
    if (entry.use->ended()) closed.push_back(fd);
  }
  for (const int fd : closed) Remove(fd);
}

bool ConnectionTable::SweepEnded() {
  const int64_t before = size();
  for (const int fd : std::vector<int>(ended_)) {
    if (connections_.at(fd).use->ended()) Remove(fd);
  }
  return size() < before;
}

std::optional<ConnectionTable::Stranger> ConnectionTable::OldestStrangerOf(const Set& set) {
  while (!set.strangers.empty()) {
    const int fd = set.strangers.begin()->second;
    Entry& entry = connections_.at(fd);
    const ConnectionUse& use = *entry.use;
    if (use.is_stranger()) {
      const int64_t sent = use.data_bytes.load(std::memory_order_relaxed) - entry.data_bytes;
      const bool watches =
          use.marks != nullptr && use.marks->watches.load(std::memory_order_relaxed) > 0;
      return Stranger{fd, entry.since, !use.spoke.load(std::memory_order_relaxed),
                      watches || sent >= kStrangerBytes};
    }
    Dequeue(entry);
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
    if (entry.ending || !entry.use->is_stranger()) continue;
    if (!all_.strangers.contains(entry.arrival)) Renew(fd, now);
  }
}

std::vector<int> ConnectionTable::Largest(int64_t most) const {
  struct Holder {
    int fd = -1;
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
    if (entry.ending) continue;
    const int64_t bytes = entry.use->held_bytes.load(std::memory_order_relaxed);
    if (bytes == 0) continue;
    const size_t place = places.try_emplace(entry.peer, peers.size()).first->second;
    if (place == peers.size()) peers.emplace_back();
    peers[place].holders.push_back({fd, bytes});
    peers[place].bytes += bytes;
    all += bytes;
  }
  std::vector<int> largest;
  while (all > most) {
    Peer& peer = *std::max_element(peers.begin(), peers.end(), less);
    Holder& holder = *std::max_element(peer.holders.begin(), peer.holders.end(), less);
    largest.push_back(holder.fd);
    all -= holder.bytes;
    peer.bytes -= std::exchange(holder.bytes, 0);
  }
  return largest;
}

}  // namespace attend
