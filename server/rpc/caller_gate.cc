// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/caller_gate.h"

#include <grpcpp/grpcpp.h>

#include <string>
#include <string_view>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/grpc_wire.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// They need no credentials. What comes for them must be bounded (app/method_bounds.cc).
constexpr std::string_view kOpenMethods[] = {"/grpc.health.v1.Health/Check",
                                             "/grpc.health.v1.Health/Watch"};

std::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

}  // namespace

grpc::Status CallerGate::Process(const InputMetadata& metadata, grpc::AuthContext* connection,
                                 OutputMetadata*, OutputMetadata*) {
  return ToGrpc(OrOutOfMemory([&] { return Check(metadata, *connection); }));
}

Status CallerGate::Check(const InputMetadata& metadata, const grpc::AuthContext& connection) const {
  const auto path = metadata.find(":path");
  const std::string_view method = path == metadata.end() ? std::string_view() : View(path->second);
  for (const std::string_view open : kOpenMethods) {
    if (method == open) return Status();
  }
  Credentials credentials;
  credentials.encrypted = true;
  std::vector<Credentials::Name> names;
  const auto authorization = metadata.find(kAuthorizationMetadataKey);
  if (authorization != metadata.end()) {
    credentials.authorization = View(authorization->second);
  } else {
    names = CertificateNamesOf(connection);
    credentials.certificate = names;
  }
  Decision decision;
  decision.status = CheckOnce([&](const char* key) { return metadata.count(key); });
  decision.refusal = CallerRefusal::kUnknown;
  if (decision.status.ok()) decision = authenticator_.Decide(credentials, Scope::kAny);
  if (decision.status.ok()) return Status();
  metrics_.RecordRejection(RejectionOf(decision.refusal));
  RefusedCall refused;
  refused.method = method;
  for (const grpc::string_ref& peer : connection.FindPropertyValues(kPeerProperty)) {
    refused.peer = std::string(View(peer));
  }
  LogRefused(logger_, access_log_, decision.status, refused);
  return decision.status;
}

}  // namespace attend
