// SPDX-License-Identifier: Apache-2.0
//
// A certificate authority for tests: issues certificates and revocation lists.

#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

#include "server/tls/openssl_free.h"
#include "tests/server/support/self_signed.h"

namespace attend::test {

using Certificate = std::unique_ptr<X509, Freer<X509_free>>;

Certificate CertificateOf(const std::string& pem);

// Everything in PEM. Not thread-safe.
class TestAuthority {
 public:
  // Signed by `issuer`, or self-signed.
  explicit TestAuthority(const std::string& name, const TestAuthority* issuer = nullptr);

  const std::string& certificate() const { return certificate_; }
  // For `usage`, valid for this long from an hour ago.
  KeyAndCertificate Issue(const std::string& name, const char* usage = "clientAuth",
                          int valid_s = 86400) const;
  // A list of these certificates, valid for this long from an hour ago.
  std::string Revoke(const std::vector<std::string>& certificates, int valid_s = 86400) const;

 private:
  using Key = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;
  // Signed by this authority; null: by `key` itself.
  static Certificate Sign(const TestAuthority* issuer, const std::string& name, EVP_PKEY* key,
                          int valid_s, const std::vector<std::pair<int, const char*>>& extensions);

  Key key_;
  std::string certificate_;
};

}  // namespace attend::test
