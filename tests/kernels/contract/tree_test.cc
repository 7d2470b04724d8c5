// SPDX-License-Identifier: Apache-2.0
//
// A tree written out is, bit for bit, what a plain loop over queries and keys makes of it.

#include "kernels/contract/tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

bool Bit(const uint8_t* row, int64_t at) { return (row[at / 8] >> (at % 8) & 1) != 0; }

// A problem's sizes and lengths, and a tree.
struct Case {
  Attention attention;
  std::vector<int64_t> q, k;  // lengths, or packed offsets
  std::vector<int64_t> drafts;
  std::vector<uint8_t> bits;
  TreeView tree;
};

Case RandomCase(std::mt19937_64& random) {
  const auto up_to = [&](int64_t most) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(most + 1));
  };
  Case made;
  Problem& p = made.attention.problem;
  p.batch = 1 + up_to(3);
  p.packed = up_to(1) == 1;
  p.len_q = up_to(40);
  p.len_k = up_to(90);
  made.tree.tokens = 1 + up_to(36);
  int64_t q_at = 0, k_at = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t q_len = up_to(p.len_q), k_len = up_to(p.len_k);
    made.drafts.push_back(up_to(std::min({q_len, k_len, made.tree.tokens})));
    made.q.push_back(p.packed ? std::exchange(q_at, q_at + q_len) : q_len);
    made.k.push_back(p.packed ? std::exchange(k_at, k_at + k_len) : k_len);
  }
  made.q.push_back(q_at);
  made.k.push_back(k_at);
  (p.packed ? made.attention.q_offsets : made.attention.q_lengths) = made.q.data();
  (p.packed ? made.attention.kv_offsets : made.attention.kv_lengths) = made.k.data();
  const bool own = up_to(1) == 1;
  made.bits.resize(static_cast<size_t>((own ? p.batch : 1) * TreeBytes(made.tree.tokens)));
  for (uint8_t& byte : made.bits) byte = static_cast<uint8_t>(random());
  made.tree.bits = made.bits.data();
  made.tree.stride_b = own ? TreeBytes(made.tree.tokens) : 0;
  made.tree.lengths = made.drafts.data();
  return made;
}

TEST(TreeTest, IsExpandedAsByAPlainLoop) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  int64_t hidden = 0;
  for (int n = 0; n < 500; ++n) {
    Case made = RandomCase(random);
    Attention& a = made.attention;
    ASSERT_TRUE(CheckDrafts("lengths", made.tree, a).ok());
    const Result<int64_t> bytes = SetTreeBias(/*shared=*/false, &a);
    ASSERT_TRUE(bytes.ok());
    std::vector<uint8_t> out(static_cast<size_t>(*bytes) + 1, 0x5a);
    WriteTree(made.tree, a, out.data());
    ASSERT_EQ(out.back(), 0x5a) << "written past the end";
    for (int64_t b = 0; b < a.problem.batch; ++b) {
      const Sequence s = SequenceOf(a, b);
      const int64_t draft = made.drafts[static_cast<size_t>(b)];
      const int64_t row_bytes = RowBytes(DType::kBit, made.tree.tokens);
      for (int64_t i = 0; i < s.q_len; ++i) {
        const uint8_t* const row = out.data() + (b * a.bias.stride_b + i * a.bias.stride_q) / 8;
        for (int64_t j = 0; j < s.k_len; ++j) {
          const int64_t in = i - (s.q_len - draft), key = j - (s.k_len - draft);
          const bool sees = in < 0 || key < 0 ||
                            Bit(made.bits.data() + b * made.tree.stride_b + in * row_bytes, key);
          hidden += sees ? 0 : 1;
          ASSERT_EQ(Bit(row, j), sees) << "b " << b << " i " << i << " j " << j;
        }
      }
    }
  }
  EXPECT_GT(hidden, 1000);
}

TEST(TreeTest, EqualSequencesShareOneBias) {
  Attention a;
  a.problem.batch = 5;
  a.problem.len_q = 2;
  a.problem.len_k = 9;
  const Result<int64_t> bytes = SetTreeBias(/*shared=*/true, &a);
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(*bytes, 2 * 2);
  EXPECT_EQ(a.bias.stride_b, 0);
  EXPECT_TRUE(a.problem.bias_bits);
  const uint8_t bits[] = {0b01, 0b11};
  uint8_t out[5] = {0, 0, 0, 0, 0x5a};
  WriteTree({bits, 2}, a, out);
  EXPECT_EQ(out[0], 0xff);
  EXPECT_EQ(out[1] & 1, 0);
  EXPECT_EQ(out[2], 0xff);
  EXPECT_EQ(out[3] & 1, 1);
  EXPECT_EQ(out[4], 0x5a);
}

TEST(TreeTest, DraftsFitTheirSequences) {
  Attention a;
  a.problem.batch = 2;
  a.problem.len_q = 4;
  a.problem.len_k = 6;
  const uint8_t bits[5] = {};
  EXPECT_EQ(CheckDrafts("lengths", {bits, 5}, a).message(),
            "the tree's number of tokens is 5, must be in [0, 4]: sequence 0 has 4 queries and 6 "
            "keys");
  const int64_t drafts[] = {4, 6};
  EXPECT_EQ(CheckDrafts("lengths", {bits, 5, 0, drafts}, a).message(),
            "lengths[1] is 6, must be in [0, 4]: the tree has 5 tokens");
  EXPECT_EQ(CheckTreeTokens("T", 0).message(), "T is 0, must be in [1, 1024] with a tree");
  EXPECT_TRUE(CheckTreeTokens("T", kTreeTokensMax).ok());
  EXPECT_FALSE(CheckTreeTokens("T", kTreeTokensMax + 1).ok());
}

TEST(TreeTest, ABiasThatOverflowsIsRefused) {
  Attention a;
  a.problem.batch = int64_t{1} << 20;
  a.problem.len_q = a.problem.len_k = int64_t{1} << 30;
  EXPECT_FALSE(SetTreeBias(/*shared=*/false, &a).ok());
  EXPECT_FALSE(a.problem.has_bias);
  EXPECT_TRUE(SetTreeBias(/*shared=*/true, &a).ok());
}

TEST(TreeTest, ParentsMakeATree) {
  std::mt19937_64 random(test::FreshSeed());
  for (const int64_t tokens : {1, 7, 8, 9, 65}) {
    std::vector<int64_t> parents;
    for (int64_t i = 0; i < tokens; ++i) {
      parents.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(i + 1)) - 1);
    }
    const Result<std::vector<uint8_t>> bits = TreeFromParents(parents);
    ASSERT_TRUE(bits.ok());
    ASSERT_EQ(std::ssize(*bits), TreeBytes(tokens));
    for (int64_t i = 0; i < tokens; ++i) {
      std::vector<bool> seen(static_cast<size_t>(tokens));
      for (int64_t at = i; at >= 0; at = parents[static_cast<size_t>(at)]) {
        seen[static_cast<size_t>(at)] = true;
      }
      for (int64_t j = 0; j < tokens; ++j) {
        EXPECT_EQ(Bit(bits->data() + i * RowBytes(DType::kBit, tokens), j),
                  seen[static_cast<size_t>(j)])
            << i << " " << j;
      }
    }
  }
  const int64_t late[] = {-1, 1};
  EXPECT_EQ(TreeFromParents(late).status().message(),
            "parents[1] is 1, must be in [-1, 0]: a token before it, or -1");
  EXPECT_FALSE(TreeFromParents({}).ok());
  EXPECT_FALSE(TreeFromParents(std::vector<int64_t>(kTreeTokensMax + 1, -1)).ok());
}

}  // namespace
}  // namespace attend
