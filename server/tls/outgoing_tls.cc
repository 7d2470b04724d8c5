// SPDX-License-Identifier: Apache-2.0

#include "server/tls/outgoing_tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdint>
#include <memory>

#include "server/tls/openssl_free.h"
#include "server/util/whole_file.h"

namespace attend {
namespace {

constexpr int64_t kOutgoingBytesMax = int64_t{4} << 20;

// The first object in a text; null if there is none.
template <class Owned, class Read>
Owned First(const std::string& pem, Read read) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  Owned first{bio == nullptr ? nullptr : read(bio.get(), nullptr, NoPassword, nullptr)};
  ERR_clear_error();
  return first;
}

Result<std::string> Read(const std::string& setting, const std::string& path) {
  if (path.empty()) return std::string();
  Result<std::string> text = ReadWholeFile(path, kOutgoingBytesMax);
  if (!text.ok()) return InvalidArgument(setting + " " + text.status().message());
  return text;
}

}  // namespace

Result<OutgoingTls> ReadOutgoingTls(const std::string& prefix, const OutgoingTls& paths) {
  const std::string names[] = {prefix + "-ca", prefix + "-cert", prefix + "-key"};
  Result<std::string> ca = Read(names[0], paths.ca);
  if (!ca.ok()) return ca.status();
  Result<std::string> cert = Read(names[1], paths.cert);
  if (!cert.ok()) return cert.status();
  Result<std::string> key = Read(names[2], paths.key);
  if (!key.ok()) return key.status();
  if (!paths.ca.empty() && First<Certificate>(*ca, PEM_read_bio_X509) == nullptr) {
    return InvalidArgument(names[0] + " " + paths.ca + " has no certificate in PEM");
  }
  if (paths.cert.empty()) return OutgoingTls{std::move(*ca), {}, {}};
  const Certificate shown = First<Certificate>(*cert, PEM_read_bio_X509);
  if (shown == nullptr) {
    return InvalidArgument(names[1] + " " + paths.cert + " has no certificate in PEM");
  }
  const Key own = First<Key>(*key, PEM_read_bio_PrivateKey);
  if (own == nullptr || X509_check_private_key(shown.get(), own.get()) != 1) {
    ERR_clear_error();
    return InvalidArgument(names[2] + " " + paths.key + " is not the key of " + names[1] + " " +
                           paths.cert + ", in PEM without a password");
  }
  return OutgoingTls{std::move(*ca), std::move(*cert), std::move(*key)};
}

}  // namespace attend
