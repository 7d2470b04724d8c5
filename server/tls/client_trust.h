// SPDX-License-Identifier: Apache-2.0
//
// The certificate presented by the client of an open connection: its names, and whether it would
// still be accepted.

#pragma once

#include <openssl/ssl.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "server/tls/tls_certificates.h"
#include "server/tls/tls_clients.h"
#include "server/transport/channel.h"

namespace attend {

// Belongs to one open connection. Used by one thread at a time.
class ClientTrust {
 public:
  // `generation`: that of the certificates that accepted it, or an earlier one. `certificates` must
  // outlive it. May throw std::bad_alloc.
  ClientTrust(const TlsCertificates& certificates, std::shared_ptr<TlsClients> clients,
              std::shared_ptr<TlsClient> client, uint64_t generation);
  ~ClientTrust() { clients_->Remove(client_); }
  ClientTrust(const ClientTrust&) = delete;
  ClientTrust& operator=(const ClientTrust&) = delete;

  // False if the current files would not accept the client. Calls `refuse` if this has not been
  // reported yet.
  bool IsTrusted(const std::function<void(const std::string& why)>& refuse);

 private:
  const TlsCertificates& certificates_;
  const std::shared_ptr<TlsClients> clients_;
  const std::shared_ptr<TlsClient> client_;
  uint64_t generation_;
};

// The client of a connection that has completed its handshake. Null: it presented no certificate.
// May throw std::bad_alloc.
std::shared_ptr<TlsClient> MakeTlsClient(const SSL* ssl, int socket, ino_t inode);

// Adds the names of a verified certificate to `peer`, as gRPC does: the first common name, and
// every DNS name and URI among the subject's alternative names. May throw std::bad_alloc.
void AddCertificateNames(X509* certificate, ConnectionPeer& peer);

}  // namespace attend
