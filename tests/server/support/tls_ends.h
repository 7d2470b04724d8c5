// SPDX-License-Identifier: Apache-2.0
//
// Both ends of a TLS connection in this thread. The server's is made as gRPC makes it, by OpenSSL's
// functions, in whose place the server's own are where a test links attend_read_guard.

#pragma once

#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "server/tls/openssl_free.h"
#include "server/tls/self_signed.h"
#include "server/tls/tls_connection.h"
#include "server/util/unique_fd.h"
#include "tests/server/support/test_authority.h"

namespace attend::test {

class TlsEnds {
 public:
  struct Client {
    bool http2 = true;                         // or it names no protocol
    const KeyAndCertificate* shown = nullptr;  // null: it has none
    int version = TLS1_3_VERSION;
  };

  // `options`: what a test has of its own; the rest is set here.
  TlsEnds(TlsConnection::Options options, const Client& client) : client_context_(NewContext()) {
    std::array<int, 2> sockets{};
    struct stat about {};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()) != 0 ||
        fstat(sockets[0], &about) != 0) {
      throw std::runtime_error("no pair of sockets");
    }
    socket_ = UniqueFd(sockets[0]);
    far_socket_ = UniqueFd(sockets[1]);
    options.socket = socket_.get();
    options.inode = about.st_ino;
    options.clock = &clock_;
    options.on_wrong = &on_wrong_;
    options.on_refused = &on_refused_;
    BIO* network = nullptr;
    BIO* inside = nullptr;
    {
      const TlsConnection::HandOver hand_over(options);
      server_.reset(SSL_new(client_context_.get()));  // of whichever context, as gRPC
      if (BIO_new_bio_pair(&network, 0, &inside, 0) != 1 || !hand_over.taken()) {
        throw std::runtime_error("no TLS connection of the server's");
      }
    }
    SSL_set_bio(server_.get(), inside, inside);
    SSL_set_accept_state(server_.get());
    MakeClient(client, network);
  }

  // What the client says first, and what the server and it say to that: the client is done then,
  // and the server has not read what the client shows.
  void Greet() {
    SSL_do_handshake(client_.get());
    SSL_do_handshake(server_.get());
    SSL_do_handshake(client_.get());
  }
  // Whether the server's handshake is done.
  bool Finish() { return SSL_do_handshake(server_.get()) == 1; }

  SSL* server() const { return server_.get(); }
  SSL* client() const { return client_.get(); }
  TlsConnection* connection() const { return TlsConnection::Of(server_.get()); }
  // Why the client was refused, each time that it was told.
  const std::vector<std::string>& refused() const { return refused_; }
  // What has been sent through the socket itself, and whether it has been ended.
  std::pair<std::string, bool> Received() const {
    std::array<char, 1024> bytes{};
    const ssize_t got = recv(far_socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    return {std::string(bytes.data(), got > 0 ? static_cast<size_t>(got) : 0), got == 0};
  }

 private:
  using Context = std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>>;
  using Connection = std::unique_ptr<SSL, Freer<SSL_free>>;

  static SSL_CTX* NewContext() { return SSL_CTX_new(TLS_method()); }
  void MakeClient(const Client& client, BIO* network) {
    constexpr std::array<unsigned char, 3> kHttp2 = {2, 'h', '2'};
    client_.reset(SSL_new(client_context_.get()));
    SSL_set_bio(client_.get(), network, network);
    SSL_set_connect_state(client_.get());
    SSL_set_min_proto_version(client_.get(), client.version);
    SSL_set_max_proto_version(client_.get(), client.version);
    if (client.http2) SSL_set_alpn_protos(client_.get(), kHttp2.data(), kHttp2.size());
    if (client.shown == nullptr) return;
    const Bio text(BIO_new_mem_buf(client.shown->key.c_str(), -1));
    const std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>> key(
        PEM_read_bio_PrivateKey(text.get(), nullptr, NoPassword, nullptr));
    SSL_use_certificate(client_.get(), CertificateOf(client.shown->certificate).get());
    SSL_use_PrivateKey(client_.get(), key.get());
  }

  const SteadyClock clock_;
  std::vector<std::string> refused_;
  const ReadGuard::OnWrong on_wrong_ = [](int /*socket*/, const char* /*what*/) {};
  const TlsConnection::OnRefused on_refused_ = [this](int /*socket*/, const std::string& why) {
    refused_.push_back(why);
  };
  UniqueFd socket_;
  UniqueFd far_socket_;
  Context client_context_;
  Connection server_;
  Connection client_;
};

}  // namespace attend::test
