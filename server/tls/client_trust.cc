// SPDX-License-Identifier: Apache-2.0

#include "server/tls/client_trust.h"

#include <openssl/x509v3.h>

#include <new>
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

ClientTrust::ClientTrust(const TlsCertificates& certificates, std::shared_ptr<TlsClients> clients,
                         std::shared_ptr<TlsClient> client, uint64_t generation)
    : certificates_(certificates),
      clients_(std::move(clients)),
      client_(std::move(client)),
      generation_(generation) {
  clients_->Add(client_);
}

bool ClientTrust::IsTrusted(const std::function<void(const std::string& why)>& refuse) {
  const uint64_t generation = certificates_.generation();
  if (generation == generation_) return true;
  const std::string why =
      certificates_.current()->VerifyError(client_->certificate.get(), client_->chain.get());
  if (!why.empty()) {
    if (!client_->refused.exchange(true)) refuse(why);
    return false;
  }
  generation_ = generation;
  return true;
}

std::shared_ptr<TlsClient> MakeTlsClient(const SSL* ssl, int socket, ino_t inode) {
  Certificate shown(SSL_get1_peer_certificate(ssl));
  if (shown == nullptr) return nullptr;
  auto client = std::make_shared<TlsClient>();
  client->socket = socket;
  client->inode = inode;
  client->certificate = std::move(shown);
  if (STACK_OF(X509)* const chain = SSL_get_peer_cert_chain(ssl)) {
    client->chain.reset(X509_chain_up_ref(chain));
    if (client->chain == nullptr) throw std::bad_alloc();
  }
  return client;
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
