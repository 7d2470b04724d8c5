// SPDX-License-Identifier: Apache-2.0
//
// What an operator does to sessions, whoever's they are.

#include <cassert>
#include <thread>

#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {

std::vector<SessionInfo> SessionTable::ListAll(const std::string& after, int64_t count_max) {
  const OnNoMemory wait(OnNoMemory::kWait);
  std::vector<SessionInfo> list;
  std::string last = after;
  while (ListSlice({}, count_max, last, list)) std::this_thread::yield();
  return list;
}

bool SessionTable::FreeAny(const std::string& id) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return false;
  Remove(SessionRef(found->second));
  assert(ConsistentLocked());
  return true;
}

int64_t SessionTable::FreeTenant(int tenant) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  int64_t freed = 0;
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    const SessionRef session = (it++)->second;
    if (session->tenant != tenant) continue;
    Remove(session);
    ++freed;
  }
  assert(ConsistentLocked());
  return freed;
}

int64_t SessionTable::UsedBytes() const {
  int64_t bytes = 0;
  for (const Pool& pool : pools_) bytes += pool.pages->stats().used_bytes;
  return bytes;
}

SessionTable::Evicted SessionTable::EvictTenant(int tenant, bool pinned) {
  const MutexLock lock(mutex_);
  const int64_t before = UsedBytes();
  Evicted evicted;
  for (const auto& [unused, each] : by_use_) {
    if (each->tenant != tenant || each->in_use > 0 || (each->pinned && !pinned)) continue;
    bool had_tokens = false;
    for (Layer& layer : each->layers) {
      if (layer.length == 0) continue;
      had_tokens = true;
      Shorten(*each, layer, 0);
      layer.evicted_from = 0;
      layer.append_id.clear();
    }
    evicted.sessions += had_tokens ? 1 : 0;
  }
  evicted.bytes = before - UsedBytes();
  stats_.evictions_operator += evicted.sessions;
  stats_.evicted_bytes += evicted.bytes;
  assert(ConsistentLocked());
  return evicted;
}

std::vector<int64_t> SessionTable::tenant_sessions() const {
  const MutexLock lock(mutex_);
  std::vector<int64_t> sessions;
  for (const TenantTable& tenant : tenants_) sessions.push_back(tenant.all.sessions);
  return sessions;
}

}  // namespace attend
