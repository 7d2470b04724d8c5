// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/tls_client.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "client/call/server_address.h"

namespace attend::client {
namespace {

constexpr std::string_view kSystem = "system";
constexpr std::array<unsigned char, 3> kHttp2 = {2, 'h', '2'};
constexpr size_t kPemBytesMax = 16 << 20;  // the authorities of a system have 0.2 MiB
// The start of an HTTP/2 connection, with empty settings.
constexpr std::string_view kHello("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);

Status ReadFile(const char* option, const std::string& path, std::string* text) {
  if (path.empty()) return Status();
  const std::string name = std::string(option) + " " + path;
  std::ifstream in(path, std::ios::binary);
  std::array<char, 4096> piece;
  while (in.read(piece.data(), piece.size()) || in.gcount() > 0) {
    text->append(piece.data(), static_cast<size_t>(in.gcount()));
    if (text->size() <= kPemBytesMax) continue;
    return InvalidArgument(name + " has more than " + std::to_string(kPemBytesMax) + " bytes");
  }
  if (!in.eof() || in.bad()) return InvalidArgument(name + ": " + std::strerror(errno));
  return Status();
}

bool IsIp(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> bytes;
  return inet_pton(AF_INET, host.c_str(), bytes.data()) == 1 ||
         inet_pton(AF_INET6, host.c_str(), bytes.data()) == 1;
}

// The meaning of a TLS alert from the server, for the user.
std::string AlertText(int alert) {
  switch (alert) {
    case SSL_AD_CERTIFICATE_REQUIRED:
      return "it accepts only clients with a certificate (--tls-cert, --tls-key)";
    case SSL_AD_HANDSHAKE_FAILURE:
      return "it accepts only clients with a certificate, or none of this client's ciphers";
    case SSL_AD_CERTIFICATE_EXPIRED:
      return "this client's certificate has expired";
    case SSL_AD_CERTIFICATE_REVOKED:
      return "this client's certificate has been revoked";
    case SSL_AD_UNKNOWN_CA:
      return "this client's certificate is signed by an authority that the server does not trust";
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
    case SSL_AD_CERTIFICATE_UNKNOWN:
      return "this client's certificate is not for clients of this server";
    case SSL_AD_PROTOCOL_VERSION:
      return "it speaks another version of TLS";
    case SSL_AD_NO_APPLICATION_PROTOCOL:
      return "it does not speak HTTP/2";
    default:
      return std::string("alert ") + SSL_alert_desc_string_long(alert);
  }
}

}  // namespace

// One connection with its deadline.
class TlsClient::Attempt {
 public:
  explicit Attempt(std::chrono::milliseconds timeout)
      : until_(std::chrono::steady_clock::now() + timeout) {}
  ~Attempt() {
    if (ssl_ != nullptr) SSL_free(ssl_);
    if (socket_ >= 0) close(socket_);
  }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  bool Connect(const std::string& host, const std::string& port);
  bool Begin(SSL_CTX* context, const std::string& name);
  // Calls step(), which returns as OpenSSL's functions do, until it is done, fails or the time is
  // over.
  template <class Step>
  int Run(const Step& step);
  SSL* ssl() const { return ssl_; }

 private:
  bool WaitFor(int events) const;

  const std::chrono::steady_clock::time_point until_;
  int socket_ = -1;
  SSL* ssl_ = nullptr;
};

bool TlsClient::Attempt::WaitFor(int events) const {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      until_ - std::chrono::steady_clock::now());
  pollfd wanted{socket_, static_cast<short>(events), 0};
  return left.count() > 0 && poll(&wanted, 1, static_cast<int>(left.count())) == 1;
}

bool TlsClient::Attempt::Connect(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &list) != 0) return false;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, freeaddrinfo);
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    if (socket_ >= 0) close(socket_);
    socket_ = socket(each->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (socket_ < 0) continue;
    if (connect(socket_, each->ai_addr, each->ai_addrlen) == 0) return true;
    int error = errno;
    socklen_t size = sizeof(error);
    if (error == EINPROGRESS && WaitFor(POLLOUT) &&
        getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) {
      return true;
    }
  }
  return false;
}

bool TlsClient::Attempt::Begin(SSL_CTX* context, const std::string& name) {
  ssl_ = SSL_new(context);
  if (ssl_ == nullptr || SSL_set_fd(ssl_, socket_) != 1) return false;
  if (IsIp(name)) return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_), name.c_str()) == 1;
  return SSL_set_tlsext_host_name(ssl_, name.c_str()) == 1 &&
         SSL_set1_host(ssl_, name.c_str()) == 1;
}

template <class Step>
int TlsClient::Attempt::Run(const Step& step) {
  for (;;) {
    ERR_clear_error();
    const int result = step();
    if (result > 0) return SSL_ERROR_NONE;
    const int error = SSL_get_error(ssl_, result);
    if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return error;
    if (!WaitFor(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT)) return error;
  }
}

TlsClient::TlsClient(const TlsOptions& options, const std::string& target)
    : options_(options), context_(SSL_CTX_new(TLS_client_method())) {
  HostAndPort parsed = ParseTarget(target);
  host_ = std::move(parsed.host);
  port_ = std::move(parsed.port);
}

Result<std::shared_ptr<const TlsClient>> TlsClient::Make(const TlsOptions& options,
                                                         const std::string& target) {
  if (options.cert.empty() != options.key.empty()) {
    return InvalidArgument(options.cert.empty() ? "tls_key needs tls_cert"
                                                : "tls_cert needs tls_key");
  }
  if (options.ca.empty()) {
    if (!options.cert.empty()) return InvalidArgument("tls_cert needs tls_ca");
    return std::shared_ptr<const TlsClient>();
  }
  if (IsUnixTarget(target)) return std::shared_ptr<const TlsClient>();
  if (IsList(target) && options.server_name.empty()) {
    return InvalidArgument("server " + target + " is a list, and tls_ca needs tls_server_name: " +
                           "the name in the servers' certificates");
  }
  const std::shared_ptr<TlsClient> made(new TlsClient(options, target));
  if (made->context_ == nullptr) return Internal("OpenSSL cannot create a TLS context");
  ATTEND_RETURN_IF_ERROR(made->Read());
  return std::shared_ptr<const TlsClient>(made);
}

Status TlsClient::Read() {
  SSL_CTX* const context = context_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_alpn_protos(context, kHttp2.data(), kHttp2.size());
  if (options_.ca == kSystem) {
    SSL_CTX_set_default_verify_paths(context);
  } else {
    ATTEND_RETURN_IF_ERROR(ReadFile("tls_ca", options_.ca, &texts_.pem_root_certs));
    if (SSL_CTX_load_verify_file(context, options_.ca.c_str()) != 1) {
      return InvalidArgument("tls_ca " + options_.ca + " has no certificate in PEM");
    }
    X509_STORE_set_flags(SSL_CTX_get_cert_store(context),
                         X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  }
  ATTEND_RETURN_IF_ERROR(ReadFile("tls_cert", options_.cert, &texts_.pem_cert_chain));
  ATTEND_RETURN_IF_ERROR(ReadFile("tls_key", options_.key, &texts_.pem_private_key));
  if (options_.cert.empty()) return Status();
  if (SSL_CTX_use_certificate_chain_file(context, options_.cert.c_str()) != 1) {
    return InvalidArgument("tls_cert " + options_.cert + " has no certificate in PEM");
  }
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return -1; });
  if (SSL_CTX_use_PrivateKey_file(context, options_.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return InvalidArgument("tls_key " + options_.key + " is not the key of tls_cert " +
                           options_.cert + ", in PEM without a password");
  }
  return Status();
}

std::shared_ptr<grpc::ChannelCredentials> TlsClient::Credentials() const {
  return grpc::SslCredentials(texts_);
}

std::string TlsClient::WhyNotVerified(SSL* ssl) const {
  const std::string name = options_.server_name.empty() ? host_ : options_.server_name;
  const auto verified = SSL_get_verify_result(ssl);
  switch (verified) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return "the server's certificate has expired";
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return "the server's certificate is not signed by an authority in tls_ca " + options_.ca;
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return "the server's certificate is not for " + name + " (tls_server_name)";
    default:
      return std::string("the server's certificate is not trusted: ") +
             X509_verify_cert_error_string(verified);
  }
}

std::string TlsClient::WhyRefused(SSL* ssl) const {
  if (SSL_get_verify_result(ssl) != X509_V_OK) return WhyNotVerified(ssl);
  const auto error = ERR_peek_error();
  const int reason = ERR_GET_LIB(error) == ERR_LIB_SSL ? ERR_GET_REASON(error) : 0;
  if (reason > SSL_AD_REASON_OFFSET) {
    return "the server refuses: " + AlertText(reason - SSL_AD_REASON_OFFSET);
  }
  if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST ||
      reason == SSL_R_PACKET_LENGTH_TOO_LONG || reason == SSL_R_RECORD_LENGTH_MISMATCH) {
    return "there is no TLS at " + host_ + ":" + port_ + ", it is a plaintext port";
  }
  return "the server ended the TLS handshake";
}

std::string TlsClient::Diagnose(std::chrono::milliseconds timeout) const {
  Attempt attempt(timeout);
  if (!attempt.Connect(host_, port_) ||
      !attempt.Begin(context_.get(), options_.server_name.empty() ? host_ : options_.server_name)) {
    return "";
  }
  SSL* const ssl = attempt.ssl();
  int failed = attempt.Run([ssl] { return SSL_connect(ssl); });
  if (failed == SSL_ERROR_NONE) {
    // In TLS 1.3 a client learns only after the handshake that it was refused.
    std::array<char, 9> answer;
    failed = attempt.Run(
        [ssl] { return SSL_write(ssl, kHello.data(), static_cast<int>(kHello.size())); });
    if (failed == SSL_ERROR_NONE) {
      failed = attempt.Run([&] { return SSL_read(ssl, answer.data(), answer.size()); });
    }
  }
  const bool times_out = failed == SSL_ERROR_WANT_READ || failed == SSL_ERROR_WANT_WRITE;
  std::string why = failed == SSL_ERROR_NONE || times_out ? "" : WhyRefused(ssl);
  ERR_clear_error();
  return why;
}

}  // namespace attend::client
