// SPDX-License-Identifier: Apache-2.0

#include "server/tls/client_trust.h"

#include <openssl/x509v3.h>

#include <memory>
#include <string_view>

#include "server/tls/openssl_free.h"

namespace attend {
namespace {

using Names = std::unique_ptr<GENERAL_NAMES, Freer<GENERAL_NAMES_free>>;

std::string Text(const ASN1_STRING* string) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(string)),
          static_cast<size_t>(ASN1_STRING_length(string))};
}

void AddCommonName(const X509* certificate, ConnectionPeer& peer) {
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  const int index = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (index < 0) return;
  unsigned char* utf8 = nullptr;
  const int size =
      ASN1_STRING_to_UTF8(&utf8, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, index)));
  if (size < 0) return;
  const std::unique_ptr<unsigned char, void (*)(unsigned char*)> owned(
      utf8, [](unsigned char* bytes) { OPENSSL_free(bytes); });
  peer.common_names.emplace_back(reinterpret_cast<const char*>(utf8), static_cast<size_t>(size));
}

}  // namespace

bool ClientTrust::IsTrusted(const std::function<void(const std::string& why)>& refuse) {
  const uint64_t generation = certificates_.generation();
  if (refused_ || generation == generation_) return !refused_;
  const std::string why = certificates_.current()->VerifyError(SSL_get0_peer_certificate(ssl_),
                                                               SSL_get_peer_cert_chain(ssl_));
  generation_ = generation;
  refused_ = !why.empty();
  if (refused_) refuse(why);
  return !refused_;
}

void AddCertificateNames(X509* certificate, ConnectionPeer& peer) {
  peer.certified = true;
  AddCommonName(certificate, peer);
  const Names names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_URI) peer.uris.push_back(Text(name->d.uniformResourceIdentifier));
    if (name->type == GEN_DNS) peer.dns_names.push_back(Text(name->d.dNSName));
  }
}

}  // namespace attend
