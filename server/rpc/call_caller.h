// SPDX-License-Identifier: Apache-2.0
//
// Who makes a call: the first question that every call is asked, before it is read, answered or
// given memory.

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

// Whether the client is on this host: loopback or a Unix socket. `peer` is that of a WireCall.
bool IsLocal(std::string_view peer);

// UNAUTHENTICATED if metadata that says who calls, or for whom, came more than once: which counts
// could not be said. `count(key)` says how often it came.
template <class Count>
Status CheckOnce(const Count& count) {
  for (const char* const key : {kAuthorizationMetadataKey, kTenantMetadataKey}) {
    if (count(key) <= 1) continue;
    return Status(kUnauthenticated, std::string("the metadata ") + key + " came more than once");
  }
  return Status();
}

// The caller, if it may make a call that needs `scope`; the call's connection then counts among its
// tenant's. Otherwise what the call ends with, which is counted and logged: UNAUTHENTICATED,
// PERMISSION_DENIED, or RESOURCE_EXHAUSTED for one connection too many. `method` is the call's, for
// the log. `came`: bytes that came with it; a refused caller that is known is charged them. May
// throw std::bad_alloc.
Result<Caller> CallerOf(ServiceContext& context, const WireCall& call, std::string_view method,
                        Scope scope, int64_t came);
// For a call that stays open, whose caller was `before`: whether it still may what it could then.
// Another generation of the authenticator's is the time to ask. As CallerOf otherwise.
Status RecheckCaller(ServiceContext& context, const WireCall& call, std::string_view method,
                     Scope scope, const Caller& before);
// The same for a unary call that `finish` ends, which it does if there is no caller.
std::optional<Caller> AdmitCaller(ServiceContext& context, const WireCall& call,
                                  std::string_view method, Scope scope, const std::string& request,
                                  const std::function<void(const Status&)>& finish);

// What a caller's refusal counts as.
Rejection RejectionOf(CallerRefusal refusal);

// The request is the caller's.
void SetCaller(const Caller& caller, Request& request);

}  // namespace attend
