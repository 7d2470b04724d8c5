// SPDX-License-Identifier: Apache-2.0
//
// A server's context with its own certificate, and the other end of a TLS connection, whose socket
// blocks.

#pragma once

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "server/tls/openssl_free.h"
#include "server/tls/tls_context.h"
#include "server/util/unique_fd.h"
#include "tests/server/support/self_signed.h"

namespace attend::test {

inline std::shared_ptr<const TlsContext> MakeTlsContext() {
  const KeyAndCertificate own = *MakeSelfSigned("localhost");
  return *TlsContext::Make({.cert = {"tls-cert", "cert", own.certificate},
                            .key = {"tls-key", "key", own.key},
                            .client_ca = {},
                            .crl = {}},
                           {}, std::time(nullptr));
}

// Two ends of a connection; the first is non-blocking.
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
  // Blocks until this many bytes have arrived, or until the end.
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

// An empty handshake message of that type.
constexpr std::string_view kEmptyClientHello("\1\0\0\0", 4);

// Writes its own TLS 1.2 records, with the keys of a client that has connected and sent nothing
// since. That client must not write any more.
class Tls12Writer {
 public:
  explicit Tls12Writer(const TlsClientEnd& client) : socket_(client.socket()) {
    std::array<unsigned char, SSL_MAX_MASTER_KEY_LENGTH> master;
    const size_t master_bytes =
        SSL_SESSION_get_master_key(SSL_get_session(client.ssl()), master.data(), master.size());
    std::string seed = "key expansion" + std::string(2 * SSL3_RANDOM_SIZE, '\0');
    auto* const randoms = reinterpret_cast<unsigned char*>(seed.data()) + 13;
    SSL_get_server_random(client.ssl(), randoms, SSL3_RANDOM_SIZE);
    SSL_get_client_random(client.ssl(), randoms + SSL3_RANDOM_SIZE, SSL3_RANDOM_SIZE);
    const SSL_CIPHER* const cipher = SSL_get_current_cipher(client.ssl());
    cipher_ = EVP_get_cipherbynid(SSL_CIPHER_get_cipher_nid(cipher));
    key_bytes_ = static_cast<size_t>(EVP_CIPHER_get_key_length(cipher_));
    const std::unique_ptr<EVP_PKEY_CTX, Freer<EVP_PKEY_CTX_free>> derives(
        EVP_PKEY_CTX_new_id(EVP_PKEY_TLS1_PRF, nullptr));
    size_t bytes = keys_.size();
    if (SSL_version(client.ssl()) != TLS1_2_VERSION ||
        EVP_CIPHER_get_mode(cipher_) != EVP_CIPH_GCM_MODE ||
        EVP_PKEY_derive_init(derives.get()) != 1 ||
        EVP_PKEY_CTX_set_tls1_prf_md(derives.get(), SSL_CIPHER_get_handshake_digest(cipher)) != 1 ||
        EVP_PKEY_CTX_set1_tls1_prf_secret(derives.get(), master.data(),
                                          static_cast<int>(master_bytes)) != 1 ||
        EVP_PKEY_CTX_add1_tls1_prf_seed(derives.get(),
                                        reinterpret_cast<const unsigned char*>(seed.data()),
                                        static_cast<int>(seed.size())) != 1 ||
        EVP_PKEY_derive(derives.get(), keys_.data(), &bytes) != 1) {
      throw std::runtime_error("no keys of TLS 1.2");
    }
  }

  void Send(uint8_t type, std::string_view plaintext) {
    // The keys of both ends, then the beginnings of their nonces.
    std::array<unsigned char, 12> nonce{};
    std::memcpy(nonce.data(), keys_.data() + 2 * key_bytes_, 4);
    nonce[11] = number_;
    const auto size = static_cast<unsigned char>(plaintext.size());
    const std::array<unsigned char, 13> head = {0, 0, 0, 0, 0, 0, 0, number_, type, 3, 3, 0, size};
    std::string record = {static_cast<char>(type), 3, 3, 0,
                          static_cast<char>(8 + size + kTagBytes)};
    record.append(reinterpret_cast<const char*>(nonce.data()) + 4, 8);
    record.resize(record.size() + size + kTagBytes);
    auto* const sealed = reinterpret_cast<unsigned char*>(record.data()) + 13;
    const std::unique_ptr<EVP_CIPHER_CTX, Freer<EVP_CIPHER_CTX_free>> context(EVP_CIPHER_CTX_new());
    int bytes = 0;
    EVP_EncryptInit_ex(context.get(), cipher_, nullptr, keys_.data(), nonce.data());
    EVP_EncryptUpdate(context.get(), nullptr, &bytes, head.data(), head.size());
    EVP_EncryptUpdate(context.get(), sealed, &bytes,
                      reinterpret_cast<const unsigned char*>(plaintext.data()), size);
    EVP_EncryptFinal_ex(context.get(), sealed + size, &bytes);
    EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, sealed + size);
    if (send(socket_, record.data(), record.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(record.size())) {
      throw std::runtime_error("a record was not sent");
    }
    ++number_;
  }

 private:
  static constexpr int kTagBytes = 16;

  const int socket_;
  const EVP_CIPHER* cipher_ = nullptr;
  size_t key_bytes_ = 0;
  std::array<unsigned char, 80> keys_{};
  uint8_t number_ = 1;  // after Finished; below 256
};

}  // namespace attend::test
