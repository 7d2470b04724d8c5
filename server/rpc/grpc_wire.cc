// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/grpc_wire.h"

#include <grpc/grpc_security_constants.h>

#include <chrono>
#include <memory>

namespace attend {
namespace {

std::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

}  // namespace

std::string GrpcWire::Security() const {
  const std::shared_ptr<const grpc::AuthContext> auth = call_.auth_context();
  const auto values = auth->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  return values.empty() ? std::string() : std::string(View(values.front()));
}

std::vector<Credentials::Name> GrpcWire::CertificateNames() const {
  // The connection keeps what the names refer to.
  return CertificateNamesOf(*call_.auth_context());
}

int GrpcWire::Find(std::string_view key, std::string_view& first) const {
  const auto [begin, end] =
      call_.client_metadata().equal_range(grpc::string_ref(key.data(), key.size()));
  if (begin != end) first = View(begin->second);
  return static_cast<int>(std::distance(begin, end));
}

TimePoint GrpcWire::Deadline(const Clock& clock) const {
  const auto deadline = call_.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return kNever;
  // gRPC gives the deadline by the wall clock, so only that clock tells what is left.
  const auto left = deadline - std::chrono::system_clock::now();
  // Far deadlines would overflow the sum.
  if (left > std::chrono::hours(24 * 365)) return kNever;
  return clock.Now() + std::chrono::duration_cast<Duration>(left);
}

std::vector<Credentials::Name> CertificateNamesOf(const grpc::AuthContext& connection) {
  std::vector<Credentials::Name> names;
  if (!connection.IsPeerAuthenticated()) return names;
  const auto add = [&](const char* property, CertificateName kind) {
    for (const grpc::string_ref& text : connection.FindPropertyValues(property)) {
      names.push_back({kind, View(text)});
    }
  };
  add(GRPC_PEER_URI_PROPERTY_NAME, CertificateName::kUri);
  add(GRPC_PEER_DNS_PROPERTY_NAME, CertificateName::kDns);
  add(GRPC_X509_CN_PROPERTY_NAME, CertificateName::kCommon);
  return names;
}

}  // namespace attend
