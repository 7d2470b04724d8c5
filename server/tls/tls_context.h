// SPDX-License-Identifier: Apache-2.0
//
// An OpenSSL SSL_CTX made from the contents of certificate files. TLS 1.2 and 1.3 with forward
// secrecy, no renegotiation, no resumption: every connection's certificate is checked against the
// current files. Reads no files and knows no connections.

#pragma once

#include <openssl/ssl.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// A setting's name, its value and the contents of its file; the last two are empty if it is not
// set.
struct TlsText {
  std::string setting;
  std::string path;
  std::string pem;
};

struct TlsTexts {
  TlsText cert;
  TlsText key;
  TlsText client_ca;
  TlsText crl;
};

class TlsContext {
 public:
  // The earliest expiry of each kind, in seconds since 1970; 0: none.
  struct Expiries {
    int64_t cert = 0;
    int64_t client_ca = 0;
    int64_t crl = 0;
  };

  struct Options {
    bool http2 = true;           // HTTP/2 only; false: HTTP/1.1
    bool require_client = true;  // with client_ca: whether a client certificate is required
  };

  // An error names the setting, its file and the problem at time `now`, such as a key of another
  // certificate or an expired certificate.
  static Result<std::shared_ptr<const TlsContext>> Make(const TlsTexts& texts,
                                                        const Options& options, std::time_t now);

  SSL_CTX* get() const { return context_.get(); }
  // Why these files reject a client's certificate, regardless of when its handshake was; empty:
  // they accept it. `chain`: the certificates presented with it, or null. Thread-safe.
  std::string VerifyError(X509* shown, STACK_OF(X509) * chain) const;
  const Expiries& expiries() const { return expiries_; }

 private:
  struct Free {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };

  TlsContext() : context_(SSL_CTX_new(TLS_server_method())) {}
  Status SetProtocol(bool http2);
  Status UseCertificate(const TlsText& cert, std::time_t now);
  Status UseKey(const TlsText& key, const TlsText& cert);
  Status TrustClients(const TlsText& client_ca, bool require);
  Status Revoke(const TlsText& crl);

  std::unique_ptr<SSL_CTX, Free> context_;
  Expiries expiries_;
};

}  // namespace attend
