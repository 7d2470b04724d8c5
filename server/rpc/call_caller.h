// SPDX-License-Identifier: Apache-2.0
//
// Identifies the caller of a call: checked for every call before it is read, answered or given
// memory.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/util/status.h"
#include "server/auth/authenticator.h"
#include "server/request/request.h"
#include "server/rpc/call_context.h"
#include "server/wire/wire_call.h"

namespace attend {

// Whether the client is on this host: loopback or a Unix socket. `peer` is from WireCall::Peer.
bool IsLocal(std::string_view peer);

// UNAUTHENTICATED if metadata that identifies the caller or its tenant is repeated, because it
// would be ambiguous. `count(key)` returns the number of values.
template <class Count>
Status CheckOnce(const Count& count) {
  for (const char* const key : {kAuthorizationMetadataKey, kTenantMetadataKey}) {
    if (count(key) <= 1) continue;
    return Status(kUnauthenticated,
                  std::string("the metadata ") + key + " is given more than once");
  }
  return Status();
}

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
// CallerOf for a unary call. If the caller is refused, ends the call with `finish`.
std::optional<Caller> AdmitCaller(ServiceContext& context, const WireCall& call,
                                  std::string_view method, Scope scope, const std::string& request,
                                  const std::function<void(const Status&)>& finish);

// The rejection that a caller's refusal is counted as.
Rejection RejectionOf(CallerRefusal refusal);

// Sets the request's caller and its tenant.
void SetCaller(const Caller& caller, Request& request);

}  // namespace attend
