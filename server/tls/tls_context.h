// SPDX-License-Identifier: Apache-2.0
//
// What a TLS server shows and asks for, from the texts of its files: an SSL_CTX of OpenSSL. TLS 1.2
// and 1.3 with forward secrecy, no renegotiation, no resumption: every connection's certificate is
// checked against the files as they are. Reads no file and knows no connection.

#pragma once

#include <openssl/ssl.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// A setting's name and value, and what is in the file; the last two are empty where the setting is.
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
  // When the first of each expires, in seconds since 1970; 0: there is none.
  struct Expiries {
    int64_t cert = 0;
    int64_t client_ca = 0;
    int64_t crl = 0;
  };

  struct Options {
    bool http2 = true;           // and nothing else; false: HTTP/1.1
    bool require_client = true;  // with client_ca, whether clients must show a certificate
  };

  // An error names the setting, its file, and what is wrong with it at the time `now`: among other
  // things, a key that is another certificate's, or a certificate that has expired.
  static Result<std::shared_ptr<const TlsContext>> Make(const TlsTexts& texts,
                                                        const Options& options, std::time_t now);

  SSL_CTX* get() const { return context_.get(); }
  // What these files have against a certificate that a client has shown, whenever its handshake
  // was; empty: nothing. `chain`: what came with it, or null. Thread-safe.
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
