// SPDX-License-Identifier: Apache-2.0
//
// Operator actions on the sessions of all tenants. They work in slices of bounded length and
// release the lock in between, so that requests are not held up. `last` is the id reached so far;
// sessions that are added or freed between slices do not disturb the walk.

#include <cassert>
#include <thread>

#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {

SessionTable::Listed SessionTable::ListAll(const std::string& after, int64_t count_max) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Listed list;
  std::string last = after;
  while (ListSlice({}, count_max, last, list)) std::this_thread::yield();
  return list;
}

bool SessionTable::FreeAny(const std::string& id) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || Over(*found->second)) return false;
  Remove(SessionRef(found->second));
  assert(ConsistentLocked());
  return true;
}

int64_t SessionTable::FreeTenant(int tenant) {
  int64_t freed = 0;
  std::string last;
  while (FreeSlice(tenant, last, freed)) std::this_thread::yield();
  return freed;
}

bool SessionTable::FreeSlice(int tenant, std::string& last, int64_t& freed) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  int64_t pages = 0;
  while (pages < options_.pages_slice) {
    const Session* const next = After(tenant, last);
    if (next == nullptr) return false;
    last = next->id;
    pages += PageCount(*next) + std::ssize(next->layers);
    ++(Over(*next) ? stats_.expired : freed);
    Remove(SessionRef(sessions_.at(last)));
  }
  assert(ConsistentLocked());
  return true;
}

int64_t SessionTable::UsedBytes() const {
  int64_t bytes = 0;
  for (const Device& device : devices_) bytes += device.pages->stats().used_bytes;
  return bytes;
}

SessionTable::Evicted SessionTable::EvictTenant(int tenant, bool pinned) {
  Evicted evicted;
  std::string last;
  while (EvictSlice(tenant, pinned, last, evicted)) std::this_thread::yield();
  return evicted;
}

bool SessionTable::EvictSlice(int tenant, bool pinned, std::string& last, Evicted& evicted) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  const int64_t before = UsedBytes();
  int64_t sessions = 0, pages = 0;
  Session* next = After(tenant, last);
  for (; next != nullptr && pages < options_.pages_slice; next = After(tenant, last)) {
    last = next->id;
    if (next->in_use > 0 || (next->pinned && !pinned)) continue;
    Settle(*next);
    if (next->longest() == 0) continue;
    pages += PageCount(*next) + std::ssize(next->layers);
    const std::vector<int64_t> none(next->layers.size());
    next->leaf = TreeOf(*next).Cut(*next->leaf, none, 0);
    for (size_t n = 0; n < next->layers.size(); ++n) {
      Layer& layer = next->layers[n];
      PageTree::Fit(*next->leaf, n);
      if (layer.length == 0) continue;
      layer.length = layer.evicted_from = 0;
      layer.append_id.clear();
    }
    ++sessions;
  }
  evicted.sessions += sessions;
  evicted.bytes += before - UsedBytes();
  stats_.evictions_operator += sessions;
  stats_.evicted_bytes += before - UsedBytes();
  assert(ConsistentLocked());
  return next != nullptr;
}

std::vector<int64_t> SessionTable::tenant_sessions() const {
  const MutexLock lock(mutex_);
  std::vector<int64_t> sessions;
  for (int tenant = 0; tenant < places_.tenants(); ++tenant) {
    sessions.push_back(places_.held(tenant));
  }
  return sessions;
}

}  // namespace attend
