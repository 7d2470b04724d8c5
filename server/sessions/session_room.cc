// SPDX-License-Identifier: Apache-2.0
//
// How many sessions there may be, and what their tables may take: of all tenants together, and of
// one where others want it too.

#include <cassert>
#include <iterator>
#include <new>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {

void SessionTable::Count(const Session& session, TableUse more) {
  TenantTable& tenant = tenants_[session.tenant];
  for (TableUse* const each : {&table_, &tenant.all, session.pinned ? &tenant.pinned : nullptr}) {
    if (each == nullptr) continue;
    each->sessions += more.sessions;
    each->bytes += more.bytes;
    assert(each->sessions >= 0 && each->bytes >= 0);
  }
}

void SessionTable::CountList(Session& session, Layer& layer) {
  const auto pages = std::ssize(layer.pages);
  session.page_bytes +=
      (pages - std::exchange(layer.counted_pages, pages)) * layer.layout.page_bytes;
  const int64_t before = std::exchange(layer.counted_bytes, layer.list_bytes());
  Count(session, {0, layer.counted_bytes - before});
}

void SessionTable::FitList(Session& session, Layer& layer) {
  std::vector<PageNumber>& pages = layer.pages;
  if (pages.empty()) {
    std::vector<PageNumber>().swap(pages);
  } else if (2 * pages.size() < pages.capacity()) {
    const OnNoMemory give_up(OnNoMemory::kThrow);
    try {
      pages.shrink_to_fit();
    } catch (const std::bad_alloc&) {
      // It stays where it is, and what it takes stays counted.
    }
  }
  CountList(session, layer);
}

Status SessionTable::TakePlace(Session& session, CacheRefusal* refusal) {
  if (options_.limits == nullptr) return Status();
  Status status = options_.limits->Take(session.tenant, Limit::kSessions, session.place);
  if (!status.ok() && refusal != nullptr) refusal->tenant_limit = true;
  return status;
}

// Those that nobody uses go first. One that is in use ends as if its client had freed it, so that
// requests that take their time keep nobody out.
bool SessionTable::Displace(int tenant, int64_t TableUse::*what, int64_t more, int64_t most) {
  const auto enough = [&] { return more <= most - table_.*what; };
  const auto beyond_share = [&](int each, int64_t wanted) ATTEND_REQUIRES(mutex_) {
    return wanted > ShareOf(each, most) - tenants_[each].all.*what;
  };
  for (const bool in_use : {false, true}) {
    for (auto next = by_use_.begin(); next != by_use_.end();) {
      if (enough() || beyond_share(tenant, more)) return enough();
      const Session& each = *(next++)->second;
      if (each.pinned || (each.in_use > 0) != in_use || !beyond_share(each.tenant, 0)) continue;
      Remove(SessionRef(sessions_.at(each.id)));
      ++stats_.displaced;
    }
  }
  return enough();
}

Status SessionTable::MakeRoom(int tenant, TableUse more, TableUse pinned) {
  const int64_t sessions_share = ShareOf(tenant, options_.sessions_max);
  const int64_t bytes_share = ShareOf(tenant, options_.table_bytes_max);
  const TableUse& own = tenants_[tenant].pinned;
  if (pinned.sessions > 0 && pinned.sessions > sessions_share - own.sessions) {
    return ResourceExhausted(
        "the tenant has " + std::to_string(own.sessions) + " pinned sessions, may have at most " +
        std::to_string(sessions_share) + ", its share of the sessions (max-sessions)");
  }
  if (pinned.bytes > 0 && pinned.bytes > bytes_share - own.bytes) {
    return ResourceExhausted("the tables of the tenant's pinned sessions would have " +
                             std::to_string(own.bytes + pinned.bytes) +
                             " bytes, may have at most " + std::to_string(bytes_share) +
                             ", its share of the tables (memory-budget)");
  }
  if (!Displace(tenant, &TableUse::bytes, more.bytes, options_.table_bytes_max)) {
    return ResourceExhausted("there is no room for " + std::to_string(more.bytes) +
                             " bytes more in the tables of sessions, which may have at most " +
                             std::to_string(options_.table_bytes_max) +
                             " (memory-budget); the tenant's have " +
                             std::to_string(tenants_[tenant].all.bytes));
  }
  if (!Displace(tenant, &TableUse::sessions, more.sessions, options_.sessions_max)) {
    return ResourceExhausted(
        "there are as many sessions as there may be, " + std::to_string(options_.sessions_max) +
        " (max-sessions); the tenant has " + std::to_string(tenants_[tenant].all.sessions));
  }
  return Status();
}

}  // namespace attend
