// SPDX-License-Identifier: Apache-2.0
//
// A call as the rest of the server sees it: its caller, its metadata, and additions to its answer.
// A view that must not outlive the call.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/clock.h"
#include "server/auth/authenticator.h"

namespace attend {

class WireCall {
 public:
  virtual ~WireCall() = default;

  // Identifies the call's connection; see CallPeer.
  virtual std::string Peer() const = 0;
  // The same; `room` is storage in case it must be built.
  virtual const std::string& PeerIn(std::string& room) const { return room = Peer(); }
  // Whether the call came over TLS.
  virtual bool Encrypted() const = 0;
  // Whether the client presented a certificate, which was verified.
  virtual bool HasCertificate() const = 0;
  // The names in it. They live as long as the call.
  virtual std::vector<Credentials::Name> CertificateNames() const = 0;
  // The number of values of a metadata key. `first`: the first one, which lives as long as the
  // call; unchanged if there is none. May throw std::bad_alloc; one thread at a time.
  virtual int Find(std::string_view key, std::string_view& first) const = 0;
  // kNever: none.
  virtual TimePoint Deadline() const = 0;
  virtual bool Cancelled() const = 0;
  // Metadata of the answer. Initial: before anything is written; trailing: before the end. May
  // throw std::bad_alloc; one thread at a time.
  virtual void AddInitialMetadata(std::string_view key, std::string_view value) const = 0;
  virtual void AddTrailingMetadata(std::string_view key, std::string_view value) const = 0;

  // Cancels the call. Any thread; locks may be held.
  virtual void Cancel() const = 0;
};

}  // namespace attend
