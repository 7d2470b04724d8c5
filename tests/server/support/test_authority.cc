// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/test_authority.h"

#include <openssl/asn1.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <stdexcept>
#include <utility>

namespace attend::test {
namespace {

constexpr int kHourSeconds = 3600;

void Must(bool done) {
  if (!done) throw std::runtime_error("OpenSSL makes no certificate for a test");
}

// The output of `write`.
template <class Write>
std::string PemOf(Write write) {
  const Bio bio(BIO_new(BIO_s_mem()));
  Must(bio != nullptr && write(bio.get()) == 1);
  char* data = nullptr;
  const auto bytes = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(bytes));
}

std::string PemOf(X509* certificate) {
  return PemOf([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); });
}

}  // namespace

Certificate CertificateOf(const std::string& pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  Certificate read(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr));
  Must(read != nullptr);
  return read;
}

TestAuthority::TestAuthority(const std::string& name, const TestAuthority* issuer)
    : key_(EVP_EC_gen("P-256")) {
  Must(key_ != nullptr);
  certificate_ = PemOf(Sign(issuer, name, key_.get(), 2 * 86400,
                            {{NID_basic_constraints, "critical,CA:TRUE"},
                             {NID_key_usage, "critical,keyCertSign,cRLSign"}})
                           .get());
}

KeyAndCertificate TestAuthority::Issue(const std::string& name, const char* usage,
                                       int valid_s) const {
  const Key key(EVP_EC_gen("P-256"));
  Must(key != nullptr);
  const Certificate made =
      Sign(this, name, key.get(), valid_s,
           {{NID_basic_constraints, "critical,CA:FALSE"}, {NID_ext_key_usage, usage}});
  return {PemOf([&](BIO* bio) {
            return PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
          }),
          PemOf(made.get())};
}

Certificate TestAuthority::Sign(const TestAuthority* issuer, const std::string& name, EVP_PKEY* key,
                                int valid_s,
                                const std::vector<std::pair<int, const char*>>& extensions) {
  Certificate made(X509_new());
  X509* const raw = made.get();
  const Certificate by = issuer == nullptr ? nullptr : CertificateOf(issuer->certificate_);
  int64_t serial = 0;
  Must(raw != nullptr && RAND_bytes(reinterpret_cast<unsigned char*>(&serial), 7) == 1);
  X509_NAME* const own = X509_get_subject_name(raw);
  const auto* const common = reinterpret_cast<const unsigned char*>(name.c_str());
  Must(X509_set_version(raw, X509_VERSION_3) == 1 &&
       ASN1_INTEGER_set_int64(X509_get_serialNumber(raw), serial) == 1 &&
       X509_NAME_add_entry_by_txt(own, "CN", MBSTRING_ASC, common, -1, -1, 0) == 1 &&
       X509_set_issuer_name(raw, by == nullptr ? own : X509_get_subject_name(by.get())) == 1 &&
       X509_gmtime_adj(X509_getm_notBefore(raw), -kHourSeconds) != nullptr &&
       X509_gmtime_adj(X509_getm_notAfter(raw), valid_s - kHourSeconds) != nullptr &&
       X509_set_pubkey(raw, key) == 1);
  for (const auto& [kind, value] : extensions) {
    const std::unique_ptr<X509_EXTENSION, Freer<X509_EXTENSION_free>> extension(
        X509V3_EXT_conf_nid(nullptr, nullptr, kind, value));
    Must(extension != nullptr && X509_add_ext(raw, extension.get(), -1) == 1);
  }
  Must(X509_sign(raw, issuer == nullptr ? key : issuer->key_.get(), EVP_sha256()) > 0);
  return made;
}

std::string TestAuthority::Revoke(const std::vector<std::string>& certificates, int valid_s) const {
  const std::unique_ptr<X509_CRL, Freer<X509_CRL_free>> list(X509_CRL_new());
  const std::unique_ptr<ASN1_TIME, Freer<ASN1_TIME_free>> begin(
      X509_gmtime_adj(nullptr, -kHourSeconds));
  const std::unique_ptr<ASN1_TIME, Freer<ASN1_TIME_free>> end(
      X509_gmtime_adj(nullptr, valid_s - kHourSeconds));
  const Certificate own = CertificateOf(certificate_);
  Must(list != nullptr && begin != nullptr && end != nullptr &&
       X509_CRL_set_version(list.get(), X509_CRL_VERSION_2) == 1 &&
       X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(own.get())) == 1 &&
       X509_CRL_set1_lastUpdate(list.get(), begin.get()) == 1 &&
       X509_CRL_set1_nextUpdate(list.get(), end.get()) == 1);
  for (const std::string& pem : certificates) {
    const Certificate revoked = CertificateOf(pem);
    std::unique_ptr<X509_REVOKED, Freer<X509_REVOKED_free>> entry(X509_REVOKED_new());
    Must(entry != nullptr &&
         X509_REVOKED_set_serialNumber(entry.get(), X509_get_serialNumber(revoked.get())) == 1 &&
         X509_REVOKED_set_revocationDate(entry.get(), begin.get()) == 1 &&
         X509_CRL_add0_revoked(list.get(), entry.get()) == 1);
    (void)entry.release();  // the list's
  }
  Must(X509_CRL_sort(list.get()) == 1 && X509_CRL_sign(list.get(), key_.get(), EVP_sha256()) > 0);
  return PemOf([&](BIO* bio) { return PEM_write_bio_X509_CRL(bio, list.get()); });
}

}  // namespace attend::test
