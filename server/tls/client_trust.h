// SPDX-License-Identifier: Apache-2.0
//
// The certificate that the client of an open connection has shown: what it says, and whether it
// would still be let in.

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

// Belongs to one open connection. One thread at a time.
class ClientTrust {
 public:
  // `generation`: that of the certificates by which it was let in, or an earlier one.
  // `certificates` must outlive it. May throw std::bad_alloc.
  ClientTrust(const TlsCertificates& certificates, std::shared_ptr<TlsClients> clients,
              std::shared_ptr<TlsClient> client, uint64_t generation);
  ~ClientTrust() { clients_->Remove(client_); }
  ClientTrust(const ClientTrust&) = delete;
  ClientTrust& operator=(const ClientTrust&) = delete;

  // False: by the files as they are now the client would not be let in. `refuse` is called if it
  // has not been told of so far.
  bool IsTrusted(const std::function<void(const std::string& why)>& refuse);

 private:
  const TlsCertificates& certificates_;
  const std::shared_ptr<TlsClients> clients_;
  const std::shared_ptr<TlsClient> client_;
  uint64_t generation_;
};

// The client of a connection whose handshake is done. Null: it has shown no certificate. May throw
// std::bad_alloc.
std::shared_ptr<TlsClient> MakeTlsClient(const SSL* ssl, int socket, ino_t inode);

// Adds what a verified certificate says to `peer`, in gRPC's way: the first common name, and every
// DNS name and URI of the subject's alternative names. May throw std::bad_alloc.
void AddCertificateNames(X509* certificate, ConnectionPeer& peer);

}  // namespace attend
