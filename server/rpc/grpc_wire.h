// SPDX-License-Identifier: Apache-2.0
//
// A call that gRPC's library carries.

#pragma once

#include <grpcpp/grpcpp.h>

#include <string>
#include <string_view>
#include <vector>

#include "server/wire/wire_call.h"

namespace attend {

class GrpcWire final : public WireCall {
 public:
  // The call must outlive it.
  explicit GrpcWire(grpc::CallbackServerContext& call) : call_(call) {}

  std::string Peer() const override { return call_.peer(); }
  std::string Security() const override;
  bool HasCertificate() const override { return call_.auth_context()->IsPeerAuthenticated(); }
  std::vector<Credentials::Name> CertificateNames() const override;
  int Find(std::string_view key, std::string_view& first) const override;
  TimePoint Deadline(const Clock& clock) const override;
  bool Cancelled() const override { return call_.IsCancelled(); }
  void AddInitialMetadata(std::string_view key, std::string_view value) const override {
    call_.AddInitialMetadata(std::string(key), std::string(value));
  }
  void AddTrailingMetadata(std::string_view key, std::string_view value) const override {
    call_.AddTrailingMetadata(std::string(key), std::string(value));
  }
  grpc_call* OfGrpc() const override { return call_.c_call(); }
  void Cancel() const override { call_.TryCancel(); }

 private:
  grpc::CallbackServerContext& call_;
};

// The names in a connection's certificate; none unless it was verified.
std::vector<Credentials::Name> CertificateNamesOf(const grpc::AuthContext& connection);

}  // namespace attend
