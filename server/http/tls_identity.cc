// SPDX-License-Identifier: Apache-2.0

#include "server/http/tls_identity.h"

#include <openssl/err.h>
#include <openssl/x509.h>

#include <cstring>
#include <ctime>
#include <utility>

namespace attend {
namespace {

// The first error in OpenSSL's queue, which is the cause, and none left there.
std::string OpenSslError() {
  const unsigned long error = ERR_get_error();
  ERR_clear_error();
  if (ERR_SYSTEM_ERROR(error)) return std::strerror(ERR_GET_REASON(error));
  const char* const reason = ERR_reason_error_string(error);
  return reason != nullptr ? reason : "unknown error";
}

std::chrono::system_clock::time_point ExpiryOf(const SSL_CTX* context) {
  const X509* const certificate = SSL_CTX_get0_certificate(context);
  tm parts{};
  if (certificate == nullptr || ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &parts) != 1) {
    return {};
  }
  return std::chrono::system_clock::from_time_t(timegm(&parts));
}

// What the key of an encrypted file is asked for: there is nobody to ask.
int NoPassword(char*, int, int, void*) { return -1; }

}  // namespace

Result<std::unique_ptr<TlsIdentity>> TlsIdentity::Load(const TlsFiles& files) {
  std::unique_ptr<TlsIdentity> identity(new TlsIdentity(files));
  ATTEND_RETURN_IF_ERROR(identity->Read());
  return identity;
}

Status TlsIdentity::Read() {
  certificate_stamp_ = StampOf(files_.certificate);
  key_stamp_ = StampOf(files_.key);
  ERR_clear_error();
  std::unique_ptr<SSL_CTX, FreeSsl> context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return Internal("no TLS: " + OpenSslError());
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  // A connection has one request: nothing of it is kept for the next.
  SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_default_passwd_cb(context.get(), NoPassword);
  if (SSL_CTX_use_certificate_chain_file(context.get(), files_.certificate.c_str()) != 1) {
    return InvalidArgument("certificate " + files_.certificate + ": " + OpenSslError());
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), files_.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return InvalidArgument("key " + files_.key + ": " + OpenSslError());
  }
  context_ = std::move(context);
  expires_ = ExpiryOf(context_.get());
  return Status();
}

Result<bool> TlsIdentity::Refresh() {
  if (StampOf(files_.certificate) == certificate_stamp_ && StampOf(files_.key) == key_stamp_) {
    return false;
  }
  ATTEND_RETURN_IF_ERROR(Read());
  return true;
}

std::unique_ptr<SSL, FreeSsl> TlsIdentity::Begin() const {
  std::unique_ptr<SSL, FreeSsl> ssl(SSL_new(context_.get()));
  if (ssl != nullptr) SSL_set_accept_state(ssl.get());
  return ssl;
}

}  // namespace attend
