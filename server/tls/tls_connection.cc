// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_connection.h"

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <new>
#include <span>
#include <utility>

namespace attend {
namespace {

thread_local TlsConnection::HandOver* handed_over = nullptr;
// Of the connection that the thread has examined last, which may have ended since.
thread_local std::shared_ptr<const std::string> examined_peer;

// What went wrong, in OpenSSL's words, which gRPC reads too: nothing is taken from its queue.
std::string Why(const SSL* ssl) {
  const long verified = SSL_get_verify_result(ssl);  // NOLINT(google-runtime-int): OpenSSL's
  if (verified != X509_V_OK) return X509_verify_cert_error_string(verified);
  const char* const reason = ERR_reason_error_string(ERR_peek_error());
  return reason == nullptr ? "the handshake failed" : reason;
}

}  // namespace

TlsConnection::HandOver::HandOver(const Options& options) : options_(options) {
  handed_over = this;
}

TlsConnection::HandOver::~HandOver() { handed_over = nullptr; }

int TlsConnection::Index() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, Free);
  return index;
}

void TlsConnection::Free(void* /*parent*/, void* own, CRYPTO_EX_DATA* /*data*/, int /*index*/,
                         long /*argl*/, void* /*argp*/) {  // NOLINT(google-runtime-int)
  delete static_cast<TlsConnection*>(own);
}

SSL* TlsConnection::New(SSL_CTX* context) {
  using Function = SSL* (*)(SSL_CTX*);
  static const auto make = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "SSL_new"));
  HandOver* const here = handed_over;
  if (here == nullptr || here->taken_) return make(context);
  SSL* const ssl = make(here->options_.context->get());
  if (ssl == nullptr) return nullptr;
  auto* const connection = new (std::nothrow) TlsConnection(here->options_);
  if (connection == nullptr || SSL_set_ex_data(ssl, Index(), connection) != 1) {
    delete connection;
    SSL_free(ssl);
    return nullptr;
  }
  SSL_set_msg_callback(ssl, OnMessage);
  SSL_set_msg_callback_arg(ssl, connection);
  here->taken_ = true;
  here->made_ = connection;
  return ssl;
}

void TlsConnection::SetNetwork(BIO* network) {
  if (handed_over != nullptr && handed_over->made_ != nullptr) {
    handed_over->made_->network_ = network;
  }
}

TlsConnection* TlsConnection::Of(const SSL* ssl) {
  return static_cast<TlsConnection*>(SSL_get_ex_data(ssl, Index()));
}

void TlsConnection::Examine(const TlsConnection* connection) {
  examined_peer = connection == nullptr ? nullptr : connection->options_.peer;
}

// Nobody has taken the peer of a connection that gRPC has examined and refused. What is described
// next may be without TLS, and is not examined.
std::shared_ptr<const std::string> TlsConnection::TakePeer(bool of_tls) {
  std::shared_ptr<const std::string> peer = std::exchange(examined_peer, nullptr);
  return of_tls ? peer : nullptr;
}

// A client could ask for new keys without end.
void TlsConnection::OnMessage(int is_write, int /*version*/, int type, const void* /*bytes*/,
                              size_t /*size*/, SSL* /*ssl*/, void* own) {
  if (is_write != 0 || type != SSL3_RT_HANDSHAKE) return;
  auto* const connection = static_cast<TlsConnection*>(own);
  if (!connection->handshake_messages_.Count(connection->options_.clock->Now())) {
    connection->wrong_ = "TLS handshake messages";
  }
}

void TlsConnection::Refuse(SSL* ssl) {
  if (refused_) return;
  refused_ = true;
  (*options_.on_refused)(options_.socket, Why(ssl));
  if (network_ == nullptr) return;
  std::array<char, 1024> alert;
  const int bytes = BIO_read(network_, alert.data(), alert.size());
  if (bytes <= 0) return;
  send(options_.socket, alert.data(), static_cast<size_t>(bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
  // What the client has sent and nobody reads would make the system reset the connection, and the
  // client lose the alert.
  std::array<char, 4096> unread;
  for (int i = 0; i < 16 && recv(options_.socket, unread.data(), unread.size(), MSG_DONTWAIT) > 0;
       ++i) {
  }
}

void TlsConnection::Begin(const SSL* ssl) try {
  if (standing_ != nullptr) return;
  std::shared_ptr<TlsClient> client = ShownBy(ssl, options_.socket, options_.inode);
  if (client == nullptr) return;
  standing_ = std::make_unique<TlsStanding>(*options_.certificates, options_.clients,
                                            std::move(client), options_.generation);
  MayStay();  // the files may have changed during the handshake
} catch (const std::bad_alloc&) {
  End([&] { (*options_.on_refused)(options_.socket, "there is no memory for its certificate"); });
}

bool TlsConnection::MayStay() {
  if (standing_ == nullptr) return true;
  std::string refused;
  if (standing_->Holds([&](const std::string& why) { refused = why; })) return true;
  End([&] {
    if (!refused.empty()) (*options_.on_refused)(options_.socket, refused);
  });
  return false;
}

bool TlsConnection::Passes(const void* data, int bytes) {
  if (ended_) return false;
  const char* wrong = wrong_;
  if (wrong == nullptr && bytes > 0) {
    wrong = frames_.Read(std::span(static_cast<const uint8_t*>(data), static_cast<size_t>(bytes)),
                         options_.clock->Now());
  }
  if (wrong == nullptr) return MayStay();
  End([&] { (*options_.on_wrong)(options_.socket, wrong); });
  return false;
}

void TlsConnection::Sending(const void* data, int bytes) {
  if (ended_ || bytes <= 0) return;
  frames_.Written(std::span(static_cast<const uint8_t*>(data), static_cast<size_t>(bytes)));
}

void TlsConnection::End(const std::function<void()>& tell) {
  ended_ = true;
  // Should the descriptor be another's, nobody else loses a connection for it.
  struct stat about {};
  if (fstat(options_.socket, &about) != 0 || about.st_ino != options_.inode) return;
  tell();
  const linger reset{1, 0};
  setsockopt(options_.socket, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  shutdown(options_.socket, SHUT_RDWR);
}

}  // namespace attend
