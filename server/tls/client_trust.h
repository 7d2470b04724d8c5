// SPDX-License-Identifier: Apache-2.0
//
// The certificate presented by the client of an open connection: its names, and whether it would
// still be accepted.

#pragma once

#include <openssl/ssl.h>

#include <cstdint>
#include <functional>
#include <string>

#include "server/tls/tls_certificates.h"
#include "server/transport/channel.h"

namespace attend {

// Belongs to one open connection. Used by one thread at a time.
class ClientTrust {
 public:
  // `ssl` is the connection's, after its handshake. `generation`: that of the certificates that
  // accepted it, or an earlier one. The arguments must outlive it.
  ClientTrust(const TlsCertificates& certificates, const SSL* ssl, uint64_t generation)
      : certificates_(certificates), ssl_(ssl), generation_(generation) {}

  // False if the current files would not accept the client; calls `refuse` the first time.
  bool IsTrusted(const std::function<void(const std::string& why)>& refuse);

 private:
  const TlsCertificates& certificates_;
  const SSL* const ssl_;
  uint64_t generation_;
  bool refused_ = false;
};

// Adds the names of a verified certificate to `peer`, as gRPC does: the first common name, and
// every DNS name and URI among the subject's alternative names. May throw std::bad_alloc.
void AddCertificateNames(X509* certificate, ConnectionPeer& peer);

}  // namespace attend
