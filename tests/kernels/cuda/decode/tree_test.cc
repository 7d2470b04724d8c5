// SPDX-License-Identifier: Apache-2.0
//
// Drafts as trees, in masks of bits, by the decoding kernels: compared with double precision, with
// a causal mask, and with each sequence alone.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kernels/contract/tree.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/cuda/decode/decode_kernels.h"

namespace attend::test {
namespace {

// A mask of bits that all heads share.
ProblemSpec WithBits(ProblemSpec spec) {
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kBit;
  spec.bias_per_head = false;
  return spec;
}

// Makes the mask that of trees in which token n follows parent(n). The trees cover each sequence's
// last `tokens` queries and keys, or as many as it has.
template <class Parent>
void SetTrees(int64_t tokens, const Parent& parent, OwnedAttention* owned) {
  const Attention& a = owned->attention;
  auto* const bits = static_cast<uint8_t*>(const_cast<void*>(a.bias.data));
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    const int64_t draft = std::min({tokens, s.q_len, s.k_len});
    std::vector<int64_t> parents;
    for (int64_t n = 0; n < draft; ++n) parents.push_back(parent(n));
    const std::vector<uint8_t> tree =
        draft == 0 ? std::vector<uint8_t>() : *TreeFromParents(parents);
    for (int64_t n = 0; n < draft * draft; ++n) {
      const int64_t row = n / draft, column = n % draft;
      if (tree[row * RowBytes(DType::kBit, draft) + column / 8] >> column % 8 & 1) continue;
      const int64_t at = b * a.bias.stride_b + (s.q_len - draft + row) * a.bias.stride_q + s.k_len -
                         draft + column;
      bits[at / 8] &= static_cast<uint8_t>(~(1 << at % 8));
    }
  }
}

class CudaDecodeTrees : public DecodeKernelTest {};
INSTANTIATE_TEST_SUITE_P(Kernels, CudaDecodeTrees, DecodeKernels(), NameOfKernel);

// Every variant, with rows before the draft, sequences of other lengths, windows and ALiBi.
TEST_P(CudaDecodeTrees, AnyTreesAreRight) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (const int64_t rows : {1, 2, 4, 8, 16, 64, 100}) {
    for (const int64_t group : {1, 3, 8}) {
      for (const int64_t dim : {64, 96, 128, 256}) {
        if (TestScale() < 1 && random() % 4 != 0) continue;
        ProblemSpec spec = WithBits(
            MakeSpec(2, 2 * group, 2, rows, rows + Pick(&random, {0, 1, 60, 130, 1000, 2100, 9000}),
                     dim, dim, random() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16));
        spec.bias_per_sequence = true;
        spec.problem.has_alibi = random() % 4 == 0;
        if (random() % 3 == 0) spec.problem.mask.left = Pick(&random, {5, 700, 3000});
        if (random() % 2 == 0) {
          for (int64_t b = 0; b < 2; ++b) {
            spec.kv_lengths.push_back(
                static_cast<int64_t>(random() % static_cast<uint64_t>(spec.problem.len_k + 1)));
            spec.q_lengths.push_back(
                static_cast<int64_t>(random() % static_cast<uint64_t>(rows + 1)));
          }
        }
        if (random() % 2 == 0) spec = InPages(spec, Pick(&random, {16, 64}));
        OwnedAttention owned = MakeAttention(spec, seed);
        const Attention& a = owned.attention;
        SetTrees(
            Pick(&random, {rows, std::max<int64_t>(rows - 3, 1)}),
            [&](int64_t n) { return static_cast<int64_t>(random() % (n + 1)) - 1; }, &owned);
        for (const int config : Configs(a.problem, kernel_)) {
          ASSERT_TRUE(RunOnDevice(&owned, kernel_, config).ok())
              << Label(spec, kernel_, config, seed);
          const RowsReport report = CheckRows(a, SampleRows(a, seed, kCheckWork));
          ASSERT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel_, config, seed);
          ASSERT_TRUE(owned.GuardsIntact()) << Label(spec, kernel_, config, seed);
        }
      }
    }
  }
}

// Where each token follows the one before it, the tree hides what a causal mask does, and the bits
// are the same: keys hidden from all of a chunk's rows, which the causal mask leaves out, add
// nothing. So does a mask that hides nothing.
TEST_P(CudaDecodeTrees, AChainHasTheBitsOfACausalMask) {
  const uint64_t seed = FreshSeed();
  for (const int64_t rows : {1, 2, 7, 16, 64}) {
    for (const int64_t len_k : {100, 515, 2050, 9000}) {
      for (const int64_t dim : {64, 96, 128, 256}) {
        ProblemSpec causal = MakeSpec(2, 16, 2, rows, len_k, dim, dim, DType::kBFloat16);
        ProblemSpec masked = WithBits(causal);
        causal.problem.mask.right = 0;
        OwnedAttention expected = MakeAttention(causal, seed);
        OwnedAttention chain = MakeAttention(masked, seed);
        OwnedAttention all = MakeAttention(WithBits(causal), seed);
        SetTrees(
            rows, [](int64_t n) { return n - 1; }, &chain);
        for (OwnedAttention* const each : {&expected, &chain, &all}) {
          ASSERT_TRUE(RunOnDevice(each, kernel_).ok()) << Label(masked, kernel_, -1, seed);
        }
        for (int64_t b = 0; b < 2; ++b) {
          const std::vector<float> bits = Rows(expected, b, rows);
          EXPECT_TRUE(SameBits(bits, Rows(chain, b, rows))) << Label(masked, kernel_, -1, seed);
          EXPECT_TRUE(SameBits(bits, Rows(all, b, rows))) << Label(masked, kernel_, -1, seed);
        }
      }
    }
  }
}

// Sessions with separate trees in one request; the mask has rows as long as the longest session's.
TEST_P(CudaDecodeTrees, ABatchsSequencesAreAsAlone) {
  const uint64_t seed = FreshSeed();
  const std::vector<int64_t> lengths = {9000, 70, 130, 8192, 2049, 600};
  for (const int64_t rows : {1, 4, 16, 64}) {
    ProblemSpec spec = WithBits(MakeSpec(6, 16, 2, rows, 9000, 128, 128, DType::kBFloat16));
    spec.kv_lengths = lengths;
    spec = InPages(spec, 16);
    const auto make = [&] {
      OwnedAttention owned = MakeAttention(spec, seed);
      std::mt19937_64 random(seed);
      SetTrees(
          rows, [&](int64_t n) { return static_cast<int64_t>(random() % (n + 1)) - 1; }, &owned);
      return owned;
    };
    OwnedAttention together = make();
    ASSERT_TRUE(RunOnDevice(&together, kernel_).ok());
    for (int64_t b = 0; b < 6; ++b) {
      OwnedAttention alone = make();
      Attention& a = alone.attention;
      a.problem.batch = 1;
      a.problem.len_k = lengths[static_cast<size_t>(b)];
      a.kv_lengths = nullptr;
      a.q.data = static_cast<const char*>(a.q.data) + 2 * b * a.q.stride_b;
      a.o.data = static_cast<char*>(a.o.data) + 2 * b * a.o.stride_b;
      a.lse += b * a.lse_stride_b;
      a.kv_pages.pages += b * a.kv_pages.stride;
      a.bias.data = static_cast<const char*>(a.bias.data) + b * a.bias.stride_b / 8;
      ASSERT_TRUE(RunOnDevice(&alone, kernel_).ok());
      EXPECT_TRUE(SameBits(Rows(together, b, rows), Rows(alone, 0, rows))) << b;
    }
  }
}

}  // namespace
}  // namespace attend::test
