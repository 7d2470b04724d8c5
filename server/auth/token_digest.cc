// SPDX-License-Identifier: Apache-2.0

#include "server/auth/token_digest.h"

#include <openssl/evp.h>

#include <cstddef>
#include <new>

namespace attend {
namespace {

// OpenSSL 3 looks an algorithm up by its name, under a lock, so once is enough. Never freed: calls
// may come until the process ends.
const EVP_MD* Sha256() {
  static const EVP_MD* const sha256 = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  return sha256;
}

}  // namespace

TokenDigest DigestOf(std::string_view token) {
  TokenDigest digest{};
  const EVP_MD* const sha256 = Sha256();
  if (sha256 == nullptr ||
      EVP_Digest(token.data(), token.size(), digest.data(), nullptr, sha256, nullptr) != 1) {
    throw std::bad_alloc();
  }
  return digest;
}

int FindDigest(std::span<const TokenDigest> digests, const TokenDigest& wanted) {
  int32_t found = -1;
  for (size_t n = 0; n < digests.size(); ++n) {
    uint32_t difference = 0;
    for (size_t byte = 0; byte < wanted.size(); ++byte) {
      difference |= static_cast<uint32_t>(digests[n][byte] ^ wanted[byte]);
    }
    // All ones if they are the same, else zero, without a branch: the difference is below 256.
    const int32_t mask = -static_cast<int32_t>((difference - 1) >> 31);
    found = (found & ~mask) | (static_cast<int32_t>(n) & mask);
  }
  return found;
}

}  // namespace attend
