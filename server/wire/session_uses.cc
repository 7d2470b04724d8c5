// SPDX-License-Identifier: Apache-2.0

#include "server/wire/session_uses.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/util/rejection.h"

namespace attend {
namespace {

// The rows of k according to its shape; a malformed shape is detected later.
int64_t NewRows(const v1::AttendRequest& message) {
  constexpr int kRank = 4;
  const v1::Tensor& k = message.k();
  if (k.shape_size() != kRank) return 0;
  return std::max<int64_t>(0, k.shape(message.layout() == v1::LAYOUT_BLHD ? 1 : 2));
}

}  // namespace

Status SessionsAreOff() {
  return Unimplemented("sessions are off on this server; --session-memory turns them on");
}

Status SessionsAreEnding() {
  return Because(Rejection::kDraining,
                 Unavailable("the server is draining, and its sessions end with it"));
}

Status HoldSessions(const v1::AttendRequest& message, SessionTable* table, Request& request) {
  if (message.sessions_size() == 0) return Status();
  if (!request.scopes.Has(Scope::kSessions)) {
    return Status(Code::kPermissionDenied,
                  "the request uses sessions, but the caller lacks the scope sessions");
  }
  if (table == nullptr) return SessionsAreOff();
  std::vector<CacheUse> uses;
  uses.reserve(static_cast<size_t>(message.sessions_size()));
  for (const v1::SessionUse& use : message.sessions()) {
    const auto id_bytes = static_cast<int64_t>(use.append_id().size());
    if (id_bytes > kAppendIdBytesMax) {
      return InvalidArgument("sessions[" + std::to_string(uses.size()) + "].append_id has " +
                             std::to_string(id_bytes) + " bytes, must have at most " +
                             std::to_string(kAppendIdBytesMax));
    }
    uses.push_back({use.session(), use.layer(), use.length(), use.append_id()});
  }
  Result<std::unique_ptr<CacheHold>> hold =
      table->Hold(request.tenant, uses, NewRows(message), &request.refusal);
  if (!hold.ok()) return hold.status();
  request.source.SetCache(std::move(*hold));
  return Status();
}

}  // namespace attend
