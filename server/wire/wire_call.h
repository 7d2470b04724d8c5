// SPDX-License-Identifier: Apache-2.0
//
// A call as the rest of the server sees it: who makes it, what its metadata says, and what is added
// to its answer. A view: it owns nothing of the call, and must not outlive it.

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

  // The name by which calls of its connection are told from those of others; see CallPeer.
  virtual std::string Peer() const = 0;
  // The same; in `room` if the call has to make it.
  virtual const std::string& PeerIn(std::string& room) const { return room = Peer(); }
  // It came over TLS.
  virtual bool Encrypted() const = 0;
  // The client has shown a certificate, which was verified.
  virtual bool HasCertificate() const = 0;
  // The names in it. They live as long as the call.
  virtual std::vector<Credentials::Name> CertificateNames() const = 0;
  // How often the metadata has that key. `first`: its first value, which lives as long as the call;
  // unchanged if there is none. May throw std::bad_alloc; one thread at a time.
  virtual int Find(std::string_view key, std::string_view& first) const = 0;
  // kNever if it has none.
  virtual TimePoint Deadline() const = 0;
  virtual bool Cancelled() const = 0;
  // Metadata of the answer: before anything is written, and before the end. May throw
  // std::bad_alloc; one thread at a time.
  virtual void AddInitialMetadata(std::string_view key, std::string_view value) const = 0;
  virtual void AddTrailingMetadata(std::string_view key, std::string_view value) const = 0;

  // Ends it from any thread. Locks may be held.
  virtual void Cancel() const = 0;
};

}  // namespace attend
