// SPDX-License-Identifier: Apache-2.0
//
// A call as server/rpc sees it: its client, its metadata, and its answer.

#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "server/auth/authenticator.h"
#include "server/transport/server_call.h"

namespace attend {

class WireCall {
 public:
  // The call must outlive it. Trailers are stored here, so a call may have only one WireCall at a
  // time.
  explicit WireCall(ServerCall& call) : call_(call) {}

  const ConnectionPeer& peer() const { return call_.peer(); }
  // The connection's unique name.
  const std::string& Peer() const { return call_.peer().address; }
  // The names in the client's certificate. They live as long as the call.
  std::vector<Credentials::Name> CertificateNames() const;

  // The number of values of a metadata key. `first`: the first one, which lives as long as the
  // call; unchanged if there is none.
  int Find(std::string_view key, std::string_view& first) const;
  // kNever: none.
  TimePoint Deadline() const { return call_.deadline(); }
  bool Cancelled() const { return call_.cancelled(); }

  // Metadata of the answer. Initial: before anything is written; trailing: before the end. May
  // throw std::bad_alloc; one thread at a time.
  void AddInitialMetadata(std::string_view key, std::string_view value) const {
    call_.AddHeader(key, value);
  }
  void AddTrailingMetadata(std::string_view key, std::string_view value) const {
    trailers_.Add(key, value);
  }

  // As in ServerCall. End sends the trailers, and truncates the status message to the size that
  // fits.
  void Cancel() const { call_.Cancel(); }
  void Read() const { call_.Read(); }
  void Write(OutMessage message) const { call_.Write(std::move(message)); }
  void End(const Status& status) const;

 private:
  ServerCall& call_;
  mutable CallMetadata trailers_;
};

// Ends a refused call and returns its handler.
CallHandler* RefuseCall(const WireCall& wire, const Status& status);

}  // namespace attend
