// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_context.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <string_view>
#include <vector>

#include "server/tls/openssl_free.h"

namespace attend {
namespace {

// Maximum length of a client's chain: more intermediate authorities than exist in practice.
constexpr int kChainMax = 6;
constexpr std::array<unsigned char, 3> kHttp2 = {2, 'h', '2'};

using RevocationList = std::unique_ptr<X509_CRL, Freer<X509_CRL_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Freer<X509_STORE_CTX_free>>;

Status Wrong(const TlsText& text, const std::string& what) {
  return InvalidArgument(text.setting + " " + text.path + " " + what);
}

// OpenSSL's description of its last error; clears the error queue.
std::string TakeError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "unknown error" : reason;
}

Bio Open(const TlsText& text) {
  return Bio(BIO_new_mem_buf(text.pem.data(), static_cast<int>(text.pem.size())));
}

// Reads all objects of one kind. Text between them is skipped; an incomplete object is an error.
template <class Owned, class Read>
Status ReadAll(const TlsText& text, const char* kind, Read read, std::vector<Owned>* all) {
  if (text.pem.size() > INT_MAX) return Wrong(text, "is larger than 2 GiB");
  const Bio bio = Open(text);
  ERR_clear_error();
  while (Owned next{read(bio.get(), nullptr, NoPassword, nullptr)}) all->push_back(std::move(next));
  const unsigned long error = ERR_peek_last_error();  // NOLINT(google-runtime-int): OpenSSL's
  const bool at_end =
      ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  const std::string words = TakeError();
  if (!at_end) return Wrong(text, std::string("has a broken ") + kind + ": " + words);
  if (all->empty()) return Wrong(text, std::string("has no ") + kind + " in PEM");
  return Status();
}

int64_t UnixSeconds(const ASN1_TIME* time) {
  std::tm fields{};
  if (time == nullptr || ASN1_TIME_to_tm(time, &fields) != 1) return 0;
  return timegm(&fields);
}

std::string Text(int64_t unix_seconds) {
  const std::time_t time = unix_seconds;
  std::tm fields{};
  std::array<char, 32> text{};
  gmtime_r(&time, &fields);
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &fields);
  return text.data();
}

int64_t FirstExpiry(const std::vector<Certificate>& certificates) {
  int64_t first = INT64_MAX;
  for (const Certificate& each : certificates) {
    first = std::min(first, UnixSeconds(X509_get0_notAfter(each.get())));
  }
  return first;
}

// SelectHttp2 is called only if the client names protocols; without this check, a client that names
// none would be accepted.
int RequireProtocols(SSL* ssl, int* alert, void*) {
  const unsigned char* names = nullptr;
  size_t size = 0;
  if (SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &names,
                                &size) == 1) {
    return SSL_CLIENT_HELLO_SUCCESS;
  }
  ERR_raise(ERR_LIB_SSL, SSL_R_NO_APPLICATION_PROTOCOL);  // before OpenSSL's "callback failed"
  *alert = SSL_AD_NO_APPLICATION_PROTOCOL;
  return SSL_CLIENT_HELLO_ERROR;
}

int SelectHttp2(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* in,
                unsigned int in_size, void*) {
  unsigned char* selected = nullptr;
  const int found =
      SSL_select_next_proto(&selected, out_size, kHttp2.data(), kHttp2.size(), in, in_size);
  *out = selected;
  return found == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

}  // namespace

Result<std::shared_ptr<const TlsContext>> TlsContext::Make(const TlsTexts& texts,
                                                           const Options& options,
                                                           std::time_t now) {
  const std::shared_ptr<TlsContext> made(new TlsContext());
  if (made->context_ == nullptr)
    return Internal("OpenSSL cannot create a TLS context: " + TakeError());
  ATTEND_RETURN_IF_ERROR(made->SetProtocol(options.http2));
  ATTEND_RETURN_IF_ERROR(made->UseCertificate(texts.cert, now));
  ATTEND_RETURN_IF_ERROR(made->UseKey(texts.key, texts.cert));
  if (!texts.client_ca.path.empty()) {
    ATTEND_RETURN_IF_ERROR(made->TrustClients(texts.client_ca, options.require_client));
  }
  if (!texts.crl.path.empty()) ATTEND_RETURN_IF_ERROR(made->Revoke(texts.crl));
  return std::shared_ptr<const TlsContext>(made);
}

Status TlsContext::SetProtocol(bool http2) {
  SSL_CTX* const context = context_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION);
  // 128-bit ciphers first: 256-bit ones take a third more time.
  if (SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM+AES128:ECDHE+AESGCM:ECDHE+CHACHA20") != 1 ||
      SSL_CTX_set_ciphersuites(context,
                               "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:"
                               "TLS_CHACHA20_POLY1305_SHA256") != 1) {
    return Internal("OpenSSL lacks the required ciphers: " + TakeError());
  }
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET |
                                   SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
  // A resumed session could carry a certificate that has been revoked since.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_verify_depth(context, kChainMax);
  if (http2) {
    SSL_CTX_set_client_hello_cb(context, RequireProtocols, nullptr);
    SSL_CTX_set_alpn_select_cb(context, SelectHttp2, nullptr);
  }
  return Status();
}

Status TlsContext::UseCertificate(const TlsText& cert, std::time_t now) {
  std::vector<Certificate> chain;
  ATTEND_RETURN_IF_ERROR(ReadAll(cert, "certificate", PEM_read_bio_X509, &chain));
  expiries_.cert = FirstExpiry(chain);
  for (const Certificate& each : chain) {
    const int64_t begin = UnixSeconds(X509_get0_notBefore(each.get()));
    const int64_t end = UnixSeconds(X509_get0_notAfter(each.get()));
    if (now > end) return Wrong(cert, "expired at " + Text(end));
    if (now < begin) return Wrong(cert, "is not valid before " + Text(begin));
  }
  if (SSL_CTX_use_certificate(context_.get(), chain.front().get()) != 1) {
    return Wrong(cert, "cannot be used: " + TakeError());
  }
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context_.get(), chain[i].get()) != 1) {
      return Wrong(cert, "cannot be used: " + TakeError());
    }
  }
  return Status();
}

Status TlsContext::UseKey(const TlsText& key, const TlsText& cert) {
  const Bio bio = Open(key);
  ERR_clear_error();
  const Key read(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  if (read == nullptr) {
    return Wrong(key, "has no private key in PEM without a password: " + TakeError());
  }
  if (SSL_CTX_use_PrivateKey(context_.get(), read.get()) != 1 ||
      SSL_CTX_check_private_key(context_.get()) != 1) {
    return Wrong(key, "is not the key of " + cert.setting + " " + cert.path + ": " + TakeError());
  }
  return Status();
}

Status TlsContext::TrustClients(const TlsText& client_ca, bool require) {
  std::vector<Certificate> authorities;
  ATTEND_RETURN_IF_ERROR(ReadAll(client_ca, "certificate", PEM_read_bio_X509, &authorities));
  expiries_.client_ca = FirstExpiry(authorities);
  X509_STORE* const store = SSL_CTX_get_cert_store(context_.get());
  // An intermediate authority in the file is trusted without its issuer.
  X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  for (const Certificate& each : authorities) {
    if (X509_STORE_add_cert(store, each.get()) != 1 ||
        SSL_CTX_add_client_CA(context_.get(), each.get()) != 1) {
      return Wrong(client_ca, "cannot be used: " + TakeError());
    }
  }
  SSL_CTX_set_verify(context_.get(),
                     SSL_VERIFY_PEER | (require ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0), nullptr);
  return Status();
}

Status TlsContext::Revoke(const TlsText& crl) {
  std::vector<RevocationList> lists;
  ATTEND_RETURN_IF_ERROR(ReadAll(crl, "revocation list", PEM_read_bio_X509_CRL, &lists));
  X509_STORE* const store = SSL_CTX_get_cert_store(context_.get());
  expiries_.crl = INT64_MAX;
  for (const RevocationList& each : lists) {
    expiries_.crl = std::min(expiries_.crl, UnixSeconds(X509_CRL_get0_nextUpdate(each.get())));
    if (X509_STORE_add_crl(store, each.get()) != 1) {
      return Wrong(crl, "cannot be used: " + TakeError());
    }
  }
  // A certificate whose authority has no list, or an expired one, is rejected too.
  X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL);
  return Status();
}

std::string TlsContext::VerifyError(X509* shown, STACK_OF(X509) * chain) const {
  const StoreContext checked(X509_STORE_CTX_new());
  if (checked == nullptr ||
      X509_STORE_CTX_init(checked.get(), SSL_CTX_get_cert_store(context_.get()), shown, chain) !=
          1 ||
      X509_STORE_CTX_set_default(checked.get(), "ssl_client") != 1) {
    ERR_clear_error();
    return "no memory to verify it again";
  }
  X509_STORE_CTX_set_depth(checked.get(), kChainMax);
  const bool good = X509_verify_cert(checked.get()) == 1;
  ERR_clear_error();
  return good ? "" : X509_verify_cert_error_string(X509_STORE_CTX_get_error(checked.get()));
}

}  // namespace attend
