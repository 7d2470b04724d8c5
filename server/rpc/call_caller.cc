// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_caller.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

std::optional<std::string_view> Find(const WireCall& call, const char* key) {
  std::string_view first;
  if (call.Find(key, first) == 0) return std::nullopt;
  return first;
}

// UNAUTHENTICATED if metadata that identifies the caller or its tenant is repeated, because it
// would be ambiguous.
Status CheckOnce(const WireCall& call) {
  for (const char* const key : {kAuthorizationMetadataKey, kTenantMetadataKey}) {
    std::string_view first;
    if (call.Find(key, first) <= 1) continue;
    return Status(kUnauthenticated,
                  std::string("the metadata ") + key + " is given more than once");
  }
  return Status();
}

// A caller admitted by the socket file's mode and --socket-users.
Caller CallerOfSocket(int tenant) {
  static const auto* const name = new std::shared_ptr(std::make_shared<const std::string>("unix"));
  Caller caller;
  caller.tenant = tenant;
  caller.name = *name;
  return caller;
}

// The decision of a server without authentication. File modes guard its Unix sockets, so callers on
// them may operate it.
Decision Anyone(const ServiceContext& context, const WireCall& call, Scope scope) {
  Decision decision;
  Caller& caller = decision.caller;
  const std::optional<int> bound = call.peer().tenant;
  if (bound) caller = CallerOfSocket(*bound);
  const Tenants& tenants = context.engine.options().tenants;
  if (!bound && !tenants.single()) {  // otherwise the metadata need not be scanned
    if (Status once = CheckOnce(call); !once.ok()) {
      return {{}, std::move(once), CallerRefusal::kUnknown};
    }
    const auto tenant = Find(call, kTenantMetadataKey);
    if (tenant) caller.tenant = tenants.Find(*tenant);
  }
  if (scope != Scope::kAdmin) return decision;
  if (!bound && call.Peer().starts_with("unix:")) {
    caller.scopes.Add(Scope::kAdmin);
    return decision;
  }
  decision.refusal = CallerRefusal::kScope;
  decision.status = Status(Code::kPermissionDenied,
                           "admin calls need --tokens, or a Unix socket that is not bound to a "
                           "tenant");
  return decision;
}

void RequireScope(Decision& decision, Scope scope) {
  if (decision.caller.scopes.Has(scope)) return;
  decision.refusal = CallerRefusal::kScope;
  decision.status = Status(Code::kPermissionDenied, "callers of this socket lack the scope " +
                                                        std::string(ScopeName(scope)));
}

void RequireTenant(Decision& decision, int tenant) {
  if (!decision.status.ok() || decision.caller.tenant == tenant) return;
  decision.refusal = CallerRefusal::kTenant;
  decision.status = Status(Code::kPermissionDenied, "the socket belongs to another tenant");
}

Decision Decide(const ServiceContext& context, const WireCall& call, Scope scope) {
  if (context.authenticator == nullptr) return Anyone(context, call, scope);
  if (Status once = CheckOnce(call); !once.ok()) {
    return {{}, std::move(once), CallerRefusal::kUnknown};
  }
  Credentials credentials;
  credentials.authorization = Find(call, kAuthorizationMetadataKey);
  credentials.tenant = Find(call, kTenantMetadataKey);
  std::vector<Credentials::Name> names;
  if (credentials.authorization) {
    credentials.encrypted = call.peer().encrypted;
    credentials.local = call.peer().local;
  } else {
    names = call.CertificateNames();
    credentials.certificate = names;
  }
  Decision decision;
  const std::optional<int> bound = call.peer().tenant;
  if (bound && !credentials.authorization) {
    decision.caller = CallerOfSocket(*bound);
    RequireScope(decision, scope);
  } else {
    decision = context.authenticator->Decide(credentials, scope);
    if (bound) RequireTenant(decision, *bound);
  }
  return decision;
}

// Counts, logs and reports a refusal.
Status Refuse(ServiceContext& context, const WireCall& call, std::string_view method,
              Decision decision, Rejection rejection) {
  context.metrics.RecordRejection(rejection);
  RefusedCall refused;
  refused.method = method;
  // The caller is known if only its request goes beyond its rights.
  if (decision.caller.name != nullptr) refused.caller = *decision.caller.name;
  refused.peer = call.Peer();
  LogRefused(context.logger, context.access_log, decision.status, refused);
  AddRefusal(context, decision.status.code(), Refusal(), call);
  return Because(Rejection::kCounted, std::move(decision.status));
}

}  // namespace

Result<Caller> CallerOf(ServiceContext& context, const WireCall& call, std::string_view method,
                        Scope scope, int64_t came) {
  Decision decision = Decide(context, call, scope);
  Rejection rejection = RejectionOf(decision.refusal);
  if (const ConnectionHolds::Ref& holds = call.peer().holds; decision.status.ok() && holds) {
    // Operators are admitted however many connections their tenant has.
    if (scope == Scope::kAdmin) {
      holds->CallUncounted(decision.credential);
    } else {
      decision.status = holds->Call(decision.caller.tenant, decision.credential);
      rejection = Rejection::kTenantLimit;
      if (!decision.status.ok()) {  // it has not been determined whether this is a request
        context.metrics.RecordSmallCall(decision.caller.tenant, decision.status.code());
      }
    }
  }
  if (decision.status.ok()) return std::move(decision.caller);
  const bool known = decision.status.code() != kUnauthenticated;
  if (known) context.limits.Came(decision.caller.tenant, came);
  return Refuse(context, call, method, std::move(decision), rejection);
}

Status RecheckCaller(ServiceContext& context, const WireCall& call, std::string_view method,
                     Scope scope, const Caller& before) {
  Decision decision = Decide(context, call, scope);
  if (decision.status.ok()) {
    const Caller& caller = decision.caller;
    bool same = caller.tenant == before.tenant;
    for (const Scope each : kScopes) same &= caller.scopes.Has(each) || !before.scopes.Has(each);
    if (same) return Status();
    decision.refusal = CallerRefusal::kScope;
    decision.status = Status(Code::kPermissionDenied,
                             "the caller's tenant or scopes have changed: open another stream");
  }
  const Rejection rejection = RejectionOf(decision.refusal);
  return Refuse(context, call, method, std::move(decision), rejection);
}

Rejection RejectionOf(CallerRefusal refusal) {
  switch (refusal) {
    case CallerRefusal::kNoCredentials:
      return Rejection::kNoCredentials;
    case CallerRefusal::kUnknown:
      return Rejection::kUnknownCaller;
    case CallerRefusal::kExpired:
      return Rejection::kExpired;
    case CallerRefusal::kCleartext:
      return Rejection::kCleartextToken;
    case CallerRefusal::kTenant:
      return Rejection::kOtherTenant;
    case CallerRefusal::kScope:
      return Rejection::kNoScope;
  }
  return Rejection::kUnknownCaller;
}

void SetCaller(const Caller& caller, Request& request) {
  request.tenant = caller.tenant;
  request.scopes = caller.scopes;
  request.caller = caller.name;
}

}  // namespace attend
