// SPDX-License-Identifier: Apache-2.0
//
// What an operator does to sessions, whoever's they are.

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
  for (auto it = sessions_.upper_bound(last);
       it != sessions_.end() && pages < options_.pages_slice;) {
    const SessionRef session = (it++)->second;
    if (session->tenant != tenant) continue;
    last = session->id;
    pages += session->page_count() + std::ssize(session->layers);
    ++(Over(*session) ? stats_.expired : freed);
    Remove(session);
  }
  assert(ConsistentLocked());
  return pages >= options_.pages_slice;
}

int64_t SessionTable::UsedBytes() const {
  int64_t bytes = 0;
  for (const Pool& pool : pools_) bytes += pool.pages->stats().used_bytes;
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
  auto next = sessions_.upper_bound(last);
  for (; next != sessions_.end() && pages < options_.pages_slice; ++next) {
    Session& each = *next->second;
    last = each.id;
    if (each.tenant != tenant || each.in_use > 0 || (each.pinned && !pinned)) continue;
    if (each.longest() == 0) continue;
    pages += each.page_count() + std::ssize(each.layers);
    for (Layer& layer : each.layers) {
      if (layer.length == 0) continue;
      Shorten(each, layer, 0);
      layer.evicted_from = 0;
      layer.append_id.clear();
    }
    ++sessions;
  }
  evicted.sessions += sessions;
  evicted.bytes += before - UsedBytes();
  stats_.evictions_operator += sessions;
  stats_.evicted_bytes += before - UsedBytes();
  assert(ConsistentLocked());
  return next != sessions_.end();
}

std::vector<int64_t> SessionTable::tenant_sessions() const {
  const MutexLock lock(mutex_);
  std::vector<int64_t> sessions;
  for (const TenantTable& tenant : tenants_) sessions.push_back(tenant.all.sessions);
  return sessions;
}

}  // namespace attend
