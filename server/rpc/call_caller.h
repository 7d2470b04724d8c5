// SPDX-License-Identifier: Apache-2.0
//
// Who makes a call: the first question that every call is asked, before it is read, answered or
// given memory.

#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/util/status.h"
#include "server/auth/authenticator.h"
#include "server/request/request.h"
#include "server/rpc/call_context.h"

namespace attend {

// Where a call comes from.
struct CallOrigin {
  bool encrypted = false;
  bool local = false;  // the client is on this host: loopback or a Unix socket
};
// `peer` is what grpc::ServerContext::peer() says, `security` the connection's
// transport_security_type.
CallOrigin OriginOf(std::string_view peer, std::string_view security);

// UNAUTHENTICATED if metadata that says who calls, or for whom, came more than once: nobody could
// say which counts.
Status CheckOnce(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata);

// The caller, if it may make a call that needs `scope`; the call's connection then counts among its
// tenant's. Otherwise what the call ends with, which is counted and logged: UNAUTHENTICATED,
// PERMISSION_DENIED, or RESOURCE_EXHAUSTED for one connection too many. `method` is the call's, for
// the log. `came`: bytes that came with it; a refused caller that is known is charged them. May
// throw std::bad_alloc.
Result<Caller> CallerOf(ServiceContext& context, grpc::CallbackServerContext& call,
                        std::string_view method, Scope scope, int64_t came);
// For a call that stays open, whose caller was `before`: whether it still may what it could then.
// Another generation of the authenticator's is the time to ask. As CallerOf otherwise.
Status RecheckCaller(ServiceContext& context, grpc::CallbackServerContext& call,
                     std::string_view method, Scope scope, const Caller& before);
// The same for a unary call that answers by `reactor`, which is finished if there is no caller.
std::optional<Caller> AdmitCaller(ServiceContext& context, grpc::CallbackServerContext& call,
                                  std::string_view method, Scope scope,
                                  const grpc::ByteBuffer& request,
                                  grpc::ServerUnaryReactor& reactor);

// What a caller's refusal counts as.
Rejection RejectionOf(CallerRefusal refusal);

// The names in a client's certificate, which was verified. The connection owns their texts.
std::vector<Credentials::Name> CertificateNamesOf(const grpc::AuthContext& connection);

// The request is the caller's.
void SetCaller(const Caller& caller, Request& request);

}  // namespace attend
