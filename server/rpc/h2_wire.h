// SPDX-License-Identifier: Apache-2.0
//
// A WireCall for a call of the server's own transport.

#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/transport/server_call.h"
#include "server/wire/wire_call.h"

namespace attend {

class H2Wire final : public WireCall {
 public:
  // The call must outlive it. Trailers are stored here, so a call may have only one H2Wire at a
  // time.
  explicit H2Wire(ServerCall& call) : call_(call) {}

  std::string Peer() const override { return call_.peer().address; }
  const std::string& PeerIn(std::string&) const override { return call_.peer().address; }
  bool Encrypted() const override { return call_.peer().encrypted; }
  bool HasCertificate() const override { return call_.peer().certified; }
  std::vector<Credentials::Name> CertificateNames() const override;
  int Find(std::string_view key, std::string_view& first) const override;
  TimePoint Deadline() const override { return call_.deadline(); }
  bool Cancelled() const override { return call_.cancelled(); }
  void AddInitialMetadata(std::string_view key, std::string_view value) const override {
    call_.AddHeader(key, value);
  }
  void AddTrailingMetadata(std::string_view key, std::string_view value) const override {
    trailers_.Add(key, value);
  }
  void Cancel() const override { call_.Cancel(); }

  // As in ServerCall. End sends the trailers, and truncates the status message to the size that
  // fits.
  void Read() const { call_.Read(); }
  void Write(OutMessage message) const { call_.Write(std::move(message)); }
  void End(const Status& status) const;

 private:
  ServerCall& call_;
  mutable CallMetadata trailers_;
};

// Ends a refused call and returns its handler. If it throws std::bad_alloc, the call has not ended.
CallHandler* RefuseCall(const H2Wire& wire, const Status& status);

}  // namespace attend
