// SPDX-License-Identifier: Apache-2.0
//
// Identifies the caller of a call: checked for every call before it is read, answered or given
// memory.

#pragma once

#include <string_view>

#include "kernels/util/status.h"
#include "server/auth/authenticator.h"
#include "server/request/request.h"
#include "server/rpc/call_context.h"
#include "server/rpc/wire_call.h"

namespace attend {

// Returns the caller if it may make a call that needs `scope`, and counts the call's connection as
// its tenant's. Otherwise returns the status to end the call with, already counted and logged:
// UNAUTHENTICATED, PERMISSION_DENIED, or RESOURCE_EXHAUSTED for one connection too many. `method`
// is for the log. `came`: bytes received with the call; a refused but known caller is charged for
// them. May throw std::bad_alloc.
Result<Caller> CallerOf(ServiceContext& context, const WireCall& call, std::string_view method,
                        Scope scope, int64_t came);
// For a call that stays open: whether its caller, `before`, still has the rights it had. Call it
// when the authenticator's generation has changed. Otherwise like CallerOf.
Status RecheckCaller(ServiceContext& context, const WireCall& call, std::string_view method,
                     Scope scope, const Caller& before);
// The rejection that a caller's refusal is counted as.
Rejection RejectionOf(CallerRefusal refusal);

// Sets the request's caller and its tenant.
void SetCaller(const Caller& caller, Request& request);

}  // namespace attend
