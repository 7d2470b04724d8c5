// SPDX-License-Identifier: Apache-2.0
//
// An authority of a test's own: the certificates that it signs, and lists of those it has revoked.

#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

#include "server/tls/openssl_free.h"
#include "server/tls/self_signed.h"

namespace attend::test {

using Certificate = std::unique_ptr<X509, Freer<X509_free>>;

Certificate CertificateOf(const std::string& pem);

// Everything in PEM. Not for several threads.
class TestAuthority {
 public:
  // Signed by `issuer`, or by itself.
  explicit TestAuthority(const std::string& name, const TestAuthority* issuer = nullptr);

  const std::string& certificate() const { return certificate_; }
  // For `usage`, and valid for so long from an hour ago.
  KeyAndCertificate Issue(const std::string& name, const char* usage = "clientAuth",
                          int valid_s = 86400) const;
  // A list with these certificates, valid for so long from an hour ago.
  std::string Revoke(const std::vector<std::string>& certificates, int valid_s = 86400) const;

 private:
  using Key = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;
  // By this authority; null: by `key` itself.
  static Certificate Sign(const TestAuthority* issuer, const std::string& name, EVP_PKEY* key,
                          int valid_s, const std::vector<std::pair<int, const char*>>& extensions);

  Key key_;
  std::string certificate_;
};

}  // namespace attend::test
