// SPDX-License-Identifier: Apache-2.0

#include "server/auth/token_digest.h"

#include <openssl/evp.h>

#include <array>
#include <bit>
#include <cstddef>
#include <new>

namespace attend {
namespace {

// OpenSSL 3 looks up an algorithm by name under a lock, so fetch it once. Never freed: calls may
// come until the process ends.
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
  using Words = std::array<uint64_t, 4>;
  static_assert(sizeof(Words) == sizeof(TokenDigest));
  const Words a = std::bit_cast<Words>(wanted);
  int64_t found = -1;
  for (size_t n = 0; n < digests.size(); ++n) {
    const Words b = std::bit_cast<Words>(digests[n]);
    const uint64_t difference = (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]);
    // Branch-free: all ones if there is no difference, else zero.
    const auto same = static_cast<int64_t>(((difference | (0 - difference)) >> 63) - 1);
    found = (found & ~same) | (static_cast<int64_t>(n) & same);
  }
  return static_cast<int>(found);
}

}  // namespace attend
