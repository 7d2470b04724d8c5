// SPDX-License-Identifier: Apache-2.0
//
// Admission of sessions and pages: places, page memory, table memory, and per-tenant limits.

#include <cstdint>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "server/util/rejection.h"

namespace attend {

Status SessionTable::TakePlace(Session& session) {
  if (options_.limits == nullptr) return Status();
  return options_.limits->Take(session.tenant, Limit::kSessions, session.place);
}

Status SessionTable::CheckRoom(int tenant, int64_t layers) const {
  if (places_.Room(tenant) > 0) return CheckTables(tenant, FixedBytes(layers));
  return ResourceExhausted(
      Rejection::kSessions,
      "the limit on sessions is reached, " + std::to_string(options_.sessions_max) +
          " (max-sessions); the tenant has " + std::to_string(places_.held(tenant)) +
          ", its reserved share is " + std::to_string(places_.own(tenant)));
}

Status SessionTable::CheckTables(int tenant, int64_t bytes) const {
  if (bytes <= tables_.Room(tenant)) return Status();
  return ResourceExhausted(Rejection::kSessions,
                           "no room for " + std::to_string(bytes) +
                               " more bytes in the session tables, which may have at most " +
                               std::to_string(tables_.all()) +
                               " (memory-budget); the tenant's have " +
                               std::to_string(tables_.held(tenant)) + ", its reserved share is " +
                               std::to_string(tables_.own(tenant)));
}

Status SessionTable::KeepLimit(const Session& session, int64_t bytes, CacheRefusal* refusal) {
  if (options_.limits == nullptr) return Status();
  PageTree& tree = TreeOf(session);
  const int64_t most = options_.limits->most(session.tenant, Limit::kSessionMemory);
  const auto missing = [&] { return tree.ledger().held(session.tenant) + bytes - most; };
  if (missing() <= 0 || tree.EvictOwn(session.tenant, missing(), clock_.Now())) return Status();
  if (refusal != nullptr) refusal->missing_bytes = missing();
  options_.limits->CountRefusal(session.tenant, Limit::kSessionMemory);
  return ResourceExhausted(Rejection::kTenantLimit,
                           "tenant limit session-memory: the tenant's sessions would have " +
                               std::to_string(most + missing()) +
                               " bytes on a device, may have at most " + std::to_string(most));
}

Status SessionTable::TakePages(const Session& session, int64_t page_bytes, int64_t count,
                               int64_t later_bytes, std::vector<PageNumber>& pages,
                               CacheRefusal* refusal) {
  if (count == 0) return Status();
  PageTree& tree = TreeOf(session);
  const int tenant = session.tenant;
  ATTEND_RETURN_IF_ERROR(CheckTables(tenant, count * kPageEntryBytes));
  while (tree.Missing(tenant, page_bytes, count) > 0 && ExpireLocked()) {
  }
  const int64_t bytes = count * tree.Charge(page_bytes) + later_bytes;
  if (tree.MayMakeRoom(tenant, bytes)) {
    ATTEND_RETURN_IF_ERROR(KeepLimit(session, bytes, refusal));
    if (tree.MakeRoom(tenant, page_bytes, count, clock_.Now())) {
      tree.Take(tenant, page_bytes, count, pages);
      return Status();
    }
  }
  const int64_t missing = tree.Missing(tenant, page_bytes, count) + later_bytes;
  if (refusal != nullptr) refusal->missing_bytes = missing;
  return ResourceExhausted(
      Rejection::kSessions,
      "sessions need " + std::to_string(count) + " more pages of " + std::to_string(page_bytes) +
          " bytes, " + std::to_string(missing) +
          " bytes more than there is room for; the tenant has " +
          std::to_string(tree.ledger().held(tenant)) + " bytes, may have at most " +
          std::to_string(tree.ledger().most(tenant)) + " (session-memory), of which " +
          std::to_string(tree.ledger().own(tenant)) + " are reserved for it");
}

}  // namespace attend
