// SPDX-License-Identifier: Apache-2.0
//
// A server's context with a certificate of its own, and the other end of a TLS connection, whose
// socket blocks.

#pragma once

#include <fcntl.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "server/tls/openssl_free.h"
#include "server/tls/self_signed.h"
#include "server/tls/tls_context.h"
#include "server/util/unique_fd.h"

namespace attend::test {

inline std::shared_ptr<const TlsContext> MakeTlsContext() {
  const KeyAndCertificate own = *MakeSelfSigned("localhost");
  return *TlsContext::Make({.cert = {"tls-cert", "cert", own.certificate},
                            .key = {"tls-key", "key", own.key},
                            .client_ca = {},
                            .crl = {}},
                           {}, std::time(nullptr));
}

// Two ends of a connection; the first does not block.
inline std::pair<UniqueFd, UniqueFd> MakeSockets(int buffer_bytes = 0) {
  std::array<int, 2> sockets{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()) != 0) {
    throw std::runtime_error("no pair of sockets");
  }
  const int flags = fcntl(sockets[0], F_GETFL);
  fcntl(sockets[0], F_SETFL, flags | O_NONBLOCK);
  if (buffer_bytes > 0) {
    for (const int socket : sockets) {
      setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    }
  }
  return {UniqueFd(sockets[0]), UniqueFd(sockets[1])};
}

class TlsClientEnd {
 public:
  explicit TlsClientEnd(UniqueFd socket, bool http2 = true)
      : socket_(std::move(socket)),
        context_(SSL_CTX_new(TLS_client_method())),
        ssl_(SSL_new(context_.get())) {
    constexpr std::array<unsigned char, 3> kHttp2 = {2, 'h', '2'};
    SSL_set_fd(ssl_.get(), socket_.get());
    SSL_set_connect_state(ssl_.get());
    if (http2) SSL_set_alpn_protos(ssl_.get(), kHttp2.data(), kHttp2.size());
  }

  SSL* ssl() const { return ssl_.get(); }
  int socket() const { return socket_.get(); }
  bool Connect() { return SSL_connect(ssl_.get()) == 1; }
  bool Send(std::string_view bytes) {
    return SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size())) ==
           static_cast<int>(bytes.size());
  }
  // Blocks until so many bytes have come, or the end.
  std::string Receive(size_t bytes) {
    std::string got(bytes, '\0');
    size_t size = 0;
    while (size < bytes) {
      const int more = SSL_read(ssl_.get(), got.data() + size, static_cast<int>(bytes - size));
      if (more <= 0) break;
      size += static_cast<size_t>(more);
    }
    got.resize(size);
    return got;
  }

 private:
  UniqueFd socket_;
  std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>> context_;
  std::unique_ptr<SSL, Freer<SSL_free>> ssl_;
};

}  // namespace attend::test
