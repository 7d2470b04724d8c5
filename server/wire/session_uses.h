// SPDX-License-Identifier: Apache-2.0
//
// The sessions that a request names.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/sessions/session_table.h"

namespace attend {

inline constexpr int64_t kAppendIdBytesMax = 32;
inline constexpr int64_t kRequestSessionsMax = 256;  // checked before the message is parsed

// Statuses for a server without session memory, and while it drains.
Status SessionsAreOff();
Status SessionsAreEnding();

// Holds the sessions named in `message`, if any, for the request, whose tenant must be set. `table`
// is null if the server has no session memory: UNIMPLEMENTED. Otherwise INVALID_ARGUMENT, or the
// status of SessionTable::Hold.
Status HoldSessions(const v1::AttendRequest& message, SessionTable* table, Request& request);

}  // namespace attend
