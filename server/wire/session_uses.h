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

// What is said where the server has no memory for sessions, and while it drains.
Status SessionsAreOff();
Status SessionsAreEnding();

// Holds the sessions that `message` names, if any, and leaves them to the request, whose tenant is
// set. `table` is null if the server has no memory for sessions: UNIMPLEMENTED. INVALID_ARGUMENT,
// and what SessionTable::Hold says.
Status HoldSessions(const v1::AttendRequest& message, SessionTable* table, Request& request);

}  // namespace attend
