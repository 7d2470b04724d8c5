// SPDX-License-Identifier: Apache-2.0
//
// A fresh key with a self-signed certificate, trusted only by those it is given to.

#pragma once

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <string>

#include "kernels/util/status.h"
#include "server/tls/openssl_free.h"

namespace attend {

struct KeyAndCertificate {
  std::string key;
  std::string certificate;  // both in PEM
};

// Valid for one day.
inline Result<KeyAndCertificate> MakeSelfSigned(const std::string& common_name) {
  constexpr int kDaySeconds = 86400;
  const auto text_of = [](BIO* bio) {
    char* data = nullptr;
    const auto bytes = BIO_get_mem_data(bio, &data);
    return std::string(data, static_cast<size_t>(bytes));
  };
  const Key key(EVP_EC_gen("P-256"));
  const Certificate certificate(X509_new());
  const Bio key_text(BIO_new(BIO_s_mem()));
  const Bio certificate_text(BIO_new(BIO_s_mem()));
  if (!key || !certificate || !key_text || !certificate_text) {
    return Internal("OpenSSL cannot create a key for TLS");
  }
  X509_NAME* const name = X509_get_subject_name(certificate.get());
  const auto* const common = reinterpret_cast<const unsigned char*>(common_name.c_str());
  const bool made =
      X509_set_version(certificate.get(), X509_VERSION_3) == 1 &&
      ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), 1) == 1 &&
      X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, common, -1, -1, 0) == 1 &&
      X509_set_issuer_name(certificate.get(), name) == 1 &&
      X509_gmtime_adj(X509_getm_notBefore(certificate.get()), 0) != nullptr &&
      X509_gmtime_adj(X509_getm_notAfter(certificate.get()), kDaySeconds) != nullptr &&
      X509_set_pubkey(certificate.get(), key.get()) == 1 &&
      X509_sign(certificate.get(), key.get(), EVP_sha256()) > 0 &&
      PEM_write_bio_X509(certificate_text.get(), certificate.get()) == 1 &&
      PEM_write_bio_PrivateKey(key_text.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr) ==
          1;
  if (!made) return Internal("OpenSSL cannot create a certificate for TLS");
  return KeyAndCertificate{text_of(key_text.get()), text_of(certificate_text.get())};
}

}  // namespace attend
