// SPDX-License-Identifier: Apache-2.0

#include "server/auth/token_digest.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "server/util/random_token.h"

namespace attend {
namespace {

std::string Hex(const TokenDigest& digest) {
  return HexText({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

TEST(TokenDigestTest, IsSha256) {
  EXPECT_EQ(Hex(DigestOf("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(DigestOf("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

std::vector<TokenDigest> RandomDigests(size_t count) {
  std::mt19937 random(7);
  std::vector<TokenDigest> digests(count);
  for (TokenDigest& digest : digests) {
    for (uint8_t& byte : digest) byte = static_cast<uint8_t>(random());
  }
  return digests;
}

TEST(TokenDigestTest, EveryDigestIsFoundAtItsIndexAndNoOther) {
  const std::vector<TokenDigest> digests = RandomDigests(50);
  for (size_t n = 0; n < digests.size(); ++n) {
    EXPECT_EQ(FindDigest(digests, digests[n]), static_cast<int>(n));
  }
  EXPECT_EQ(FindDigest(digests, DigestOf("another")), -1);
  EXPECT_EQ(FindDigest({}, digests[0]), -1);
}

TEST(TokenDigestTest, ADifferenceInAnyBitIsSeen) {
  const std::vector<TokenDigest> digests = RandomDigests(3);
  for (size_t byte = 0; byte < digests[1].size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      TokenDigest other = digests[1];
      other[byte] = static_cast<uint8_t>(other[byte] ^ (1u << bit));
      EXPECT_EQ(FindDigest(digests, other), -1) << byte << " " << bit;
    }
  }
}

// The search visits every digest: of two equal ones, a search that stopped early would find the
// first.
TEST(TokenDigestTest, TheSearchDoesNotStopAtAMatch) {
  std::vector<TokenDigest> digests = RandomDigests(20);
  digests[13] = digests[2];
  EXPECT_EQ(FindDigest(digests, digests[2]), 13);
  digests[19] = digests[2];
  EXPECT_EQ(FindDigest(digests, digests[2]), 19);
}

}  // namespace
}  // namespace attend
