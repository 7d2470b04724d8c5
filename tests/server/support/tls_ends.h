// SPDX-License-Identifier: Apache-2.0
//
// Both ends of a TLS connection in this thread, the server's as its intake sets it up.

#pragma once

#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "server/tls/client_trust.h"
#include "server/tls/openssl_free.h"
#include "server/tls/tls_certificates.h"
#include "server/transport/tls_channel.h"
#include "tests/server/support/test_authority.h"
#include "tests/server/support/tls_client.h"

namespace attend::test {

class TlsEnds {
 public:
  // A client that presents this certificate. `certificates` must outlive this.
  TlsEnds(const TlsCertificates& certificates, const KeyAndCertificate& shown)
      : certificates_(certificates),
        generation_(certificates.generation()),
        context_(certificates.current()) {
    auto [ours, theirs] = MakeSockets();
    MakeNonBlocking(theirs.get());
    channel_ = std::make_unique<TlsChannel>(std::move(ours), context_->get(), clock_);
    far_socket_ = std::move(theirs);
    MakeClient(shown);
  }

  // Exchanges the client's hello and the responses of both: the client is done then, and the server
  // has not read the client's certificate.
  void Greet() {
    SSL_do_handshake(client_.get());
    channel_->Handshake();
    SSL_do_handshake(client_.get());
  }
  // Whether the server's handshake is done, and the client is accepted.
  bool Finish() {
    const TlsChannel::Step step = channel_->Handshake();
    if (step == TlsChannel::Step::kFailed) refused_.push_back(channel_->wrong());
    if (step != TlsChannel::Step::kDone) return false;
    trust_ = std::make_unique<ClientTrust>(certificates_, channel_->ssl(), generation_);
    return Serves();
  }
  // Whether its client may still be served, as is checked before each read and after each change of
  // the files.
  bool Serves() {
    return trust_ != nullptr &&
           trust_->IsTrusted([this](const std::string& why) { refused_.push_back(why); });
  }
  // Why the client was refused, each time that it was reported.
  const std::vector<std::string>& refused() const { return refused_; }

 private:
  using Context = std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>>;
  using Connection = std::unique_ptr<SSL, Freer<SSL_free>>;

  static void MakeNonBlocking(int socket) {
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  }
  void MakeClient(const KeyAndCertificate& shown) {
    constexpr std::array<unsigned char, 3> kHttp2 = {2, 'h', '2'};
    client_.reset(SSL_new(client_context_.get()));
    SSL_set_fd(client_.get(), far_socket_.get());
    SSL_set_connect_state(client_.get());
    SSL_set_alpn_protos(client_.get(), kHttp2.data(), kHttp2.size());
    const Bio text(BIO_new_mem_buf(shown.key.c_str(), -1));
    const std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>> key(
        PEM_read_bio_PrivateKey(text.get(), nullptr, NoPassword, nullptr));
    SSL_use_certificate(client_.get(), CertificateOf(shown.certificate).get());
    SSL_use_PrivateKey(client_.get(), key.get());
  }

  const SteadyClock clock_{};
  const TlsCertificates& certificates_;
  const uint64_t generation_;
  const std::shared_ptr<const TlsContext> context_;
  std::vector<std::string> refused_;
  std::unique_ptr<TlsChannel> channel_;
  UniqueFd far_socket_;
  const Context client_context_{SSL_CTX_new(TLS_client_method())};
  Connection client_;
  std::unique_ptr<ClientTrust> trust_;
};

}  // namespace attend::test
