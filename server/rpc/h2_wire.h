// SPDX-License-Identifier: Apache-2.0
//
// A call that this server's own transport carries.

#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <string>
#include <string_view>
#include <vector>

#include "server/transport/server_call.h"
#include "server/wire/wire_call.h"

namespace attend {

class H2Wire final : public WireCall {
 public:
  // The call must outlive it.
  explicit H2Wire(ServerCall& call) : call_(call) {}

  std::string Peer() const override { return call_.peer().address; }
  const std::string& PeerIn(std::string&) const override { return call_.peer().address; }
  std::string Security() const override;
  bool HasCertificate() const override { return call_.peer().certified; }
  std::vector<Credentials::Name> CertificateNames() const override;
  int Find(std::string_view key, std::string_view& first) const override;
  TimePoint Deadline(const Clock&) const override { return call_.deadline(); }
  bool Cancelled() const override { return call_.cancelled(); }
  bool PlansNow() const override { return true; }
  void AddInitialMetadata(std::string_view key, std::string_view value) const override {
    call_.AddHeader(key, value);
  }
  void AddTrailingMetadata(std::string_view key, std::string_view value) const override {
    trailers_.Add(key, value);
  }
  void Cancel() const override { call_.Cancel(); }

  // Ends the call with that status and what was added. Once.
  void End(const grpc::Status& status) const;

 private:
  ServerCall& call_;
  mutable CallMetadata trailers_;
};

// A message in the form that the rest of the server reads. Copies what lies in a read's buffer.
grpc::ByteBuffer ToByteBuffer(InMessage&& message);
// The reverse, without a copy.
OutMessage ToOutMessage(const grpc::ByteBuffer& message);

}  // namespace attend
