// SPDX-License-Identifier: Apache-2.0
//
// cpu_flash at the ends of fp32's range: masks with finite minima, sums that overflow while means
// do not, and NaN and Inf of every pattern in every input.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/bit_patterns.h"
#include "tests/kernels/support/cpu_targets.h"

namespace attend::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

void Flash(const OwnedAttention& owned) {
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch);
}

void ExpectAllRowsRight(const OwnedAttention& owned) {
  const RowsReport report = CheckAllRows(owned.attention, false);  // weights stay in fp32
  EXPECT_TRUE(report.ok) << report.detail;
}

float* Bias(const OwnedAttention& owned) {
  return const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
}

double MeanOfV(OwnedAttention* owned, int64_t begin, int64_t end, int64_t d) {
  double sum = 0;
  for (int64_t j = begin; j < end; ++j) {
    sum += static_cast<double>(Get(owned->attention, owned->V(0, 0, j, d)));
  }
  return sum / static_cast<double>(end - begin);
}

TEST(CpuFlashBits, RandomPatternsOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const uint64_t count = static_cast<uint64_t>(300 * TestScale());
  Verdict all;
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      ProblemSpec spec = BitPatternSpec(seed + n, 3e5);
      if ((seed + n) % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
      OwnedAttention owned = MakeAttention(spec, seed + n);
      SpoilBits(&owned, seed + n);
      Flash(owned);
      const Verdict verdict = JudgeBits(owned, Leeway{});
      EXPECT_EQ(verdict.fault, "");
      EXPECT_TRUE(owned.GuardsIntact());
      all.values += verdict.values;
      all.specials += verdict.specials;
      all.open += verdict.open;
    }
  });
  if (count < 100) return;
  // The sweep proves something only if it meets many rows of each outcome.
  EXPECT_GT(all.values, 10 * static_cast<int64_t>(count));
  EXPECT_GT(all.specials, 10 * static_cast<int64_t>(count));
}

// A check of the test's own judge: an answer by the definition must pass, and rows that are never
// written must not.
TEST(CpuFlashBits, TheReferencePassesAndPoisonDoesNot) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(100 * TestScale()); ++n) {
    ProblemSpec spec = BitPatternSpec(seed + n, 1e5);
    if ((seed + n) % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed + n);
    SpoilBits(&owned, seed + n);
    CpuReference(owned.attention);
    const Verdict right = JudgeBits(owned, Leeway{});
    ASSERT_EQ(right.fault, "");
    if (right.values == 0) continue;
    owned.ResetOutput();
    ASSERT_NE(JudgeBits(owned, Leeway{}).fault, "");
  }
}

// Sums of subnormal numbers are rounded before dropout's factor enlarges their error.
TEST(CpuFlashBits, SumsOfSubnormalsTimesDropoutsFactorAreWithinBounds) {
  ForEachTarget([] {
    for (const int32_t dropout : {32768, 52429, 64880}) {
      for (const int64_t keys : {2, 5, 40}) {
        SCOPED_TRACE(std::to_string(dropout) + " keys " + std::to_string(keys));
        const uint64_t seed = FreshSeed();
        ProblemSpec spec = MakeSpec(1, 4, 4, 64, keys, 16, 16);
        spec.problem.dropout = dropout;
        spec.dropout.seed = seed;
        OwnedAttention owned = MakeAttention(spec, seed);
        auto* const v = static_cast<float*>(const_cast<void*>(owned.attention.v.data));
        for (int64_t n = 0; n < 4 * keys * 16; ++n) v[n] = static_cast<float>(n % 997) * 0x1p-149f;
        Flash(owned);
        EXPECT_EQ(JudgeBits(owned, Leeway{}).fault, "");
      }
    }
  });
}

// A finite bias removes no key, however low: such rows are the mean of V.
TEST(CpuFlashBits, RowsFullyMaskedByAFiniteBiasAreMeans) {
  ForEachTarget([] {
    for (const float mask : {-1e4f, -1e9f, -1e10f, -2.5e38f, -kMost, 2.5e38f, kMost}) {
      for (const int64_t keys : {1, 63, 64, 65, 200}) {
        SCOPED_TRACE(std::to_string(mask) + " keys " + std::to_string(keys));
        ProblemSpec spec = MakeSpec(1, 1, 1, 3, keys, 8, 8);
        spec.problem.has_bias = true;
        spec.problem.scale = 0;
        OwnedAttention owned = MakeAttention(spec, FreshSeed());
        std::fill_n(Bias(owned), 3 * keys, mask);
        Flash(owned);
        ExpectAllRowsRight(owned);
        const double lse = static_cast<double>(mask) + std::log(static_cast<double>(keys));
        EXPECT_FLOAT_EQ(owned.attention.lse[1], static_cast<float>(lse));
        for (int64_t d = 0; d < 8; ++d) {
          EXPECT_NEAR(Get(owned.attention, owned.O(0, 0, 1, d)), MeanOfV(&owned, 0, keys, d), 1e-5);
        }
      }
    }
  });
}

// Padding of any length on either side, by common masks, changes no bit.
TEST(CpuFlashBits, PaddingByAFiniteBiasChangesNothing) {
  for (const float mask : {-1e9f, -1e10f, -2.5e38f, -kMost, -kInfinity}) {
    for (const int64_t pad : {1, 63, 64, 65, 128, 200}) {
      for (const bool left : {true, false}) {
        SCOPED_TRACE(std::to_string(mask) + (left ? " left " : " right ") + std::to_string(pad));
        constexpr int64_t kVisible = 90;
        ProblemSpec spec = MakeSpec(1, 1, 1, 40, pad + kVisible, 16, 8);
        spec.problem.has_bias = true;
        spec.bias_per_query = false;
        OwnedAttention owned = MakeAttention(spec, FreshSeed());
        std::fill_n(Bias(owned) + (left ? 0 : kVisible), pad, mask);
        Flash(owned);
        // The same keys without padding.
        OwnedAttention alone = MakeAttention(spec, 1);
        Attention& a = alone.attention;
        const int64_t first = left ? pad : 0;
        a = owned.attention;
        a.problem.len_k = kVisible;
        a.k.data = owned.K(0, 0, first, 0);
        a.v.data = owned.V(0, 0, first, 0);
        a.bias.data = Bias(owned) + first;
        std::vector<float> lse(40), o(40 * 8);
        a.o = {o.data(), 0, 0, 8};
        a.lse = lse.data();
        CpuReference(a);
        for (int64_t i = 0; i < 40; ++i) {
          ASSERT_NEAR(owned.attention.lse[i], lse[static_cast<size_t>(i)], 1e-5);
          for (int64_t d = 0; d < 8; ++d) {
            ASSERT_NEAR(Get(owned.attention, owned.O(0, 0, i, d)),
                        o[static_cast<size_t>(i * 8 + d)], 1e-5);
          }
        }
      }
    }
  }
}

// Finite inputs and scores whose products with a scale or log2(e), or whose sums before the
// division, would not fit fp32.
TEST(CpuFlashBits, IntermediateOverflowsDoNotReachTheAnswer) {
  for (const float scale : {1.0f, 3.0f, 1.5e5f}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 1, 2, 1, 1);
    spec.problem.scale = scale;
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    Set(owned.attention, owned.Q(0, 0, 0, 0), 2.5e38f);
    Set(owned.attention, owned.K(0, 0, 0, 0), 1.0f / scale);
    Set(owned.attention, owned.K(0, 0, 1, 0), -1.0f / scale);
    Set(owned.attention, owned.V(0, 0, 0, 0), 7);
    Flash(owned);
    EXPECT_EQ(Get(owned.attention, owned.O(0, 0, 0, 0)), 7) << scale;
    EXPECT_FLOAT_EQ(owned.attention.lse[0], 2.5e38f) << scale;
  }
  for (const int64_t keys : {2, 3, 64, 100, 1000}) {
    for (const float value : {3e38f, -3e38f, kMost}) {
      OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 2, keys, 4, 8), FreshSeed());
      // Row 0 sees many medium keys before one that outweighs them.
      for (int64_t d = 0; d < 4; ++d) {
        Set(owned.attention, owned.Q(0, 0, 0, d), 10);
        Set(owned.attention, owned.Q(0, 0, 1, d), 0);
        for (int64_t j = 0; j < keys; ++j) {
          Set(owned.attention, owned.K(0, 0, j, d), j + 1 < keys ? 0 : 2);
        }
      }
      for (int64_t j = 0; j < keys; ++j) Set(owned.attention, owned.V(0, 0, j, 3), value);
      Flash(owned);
      ExpectAllRowsRight(owned);
      for (int64_t i = 0; i < 2; ++i) {
        EXPECT_NEAR(Get(owned.attention, owned.O(0, 0, i, 3)) / value, 1, 1e-5) << keys;
      }
      EXPECT_FLOAT_EQ(owned.attention.lse[1], static_cast<float>(std::log(keys)));
    }
  }
}

// Every encoding of NaN in every input: rows that see it are NaN, all others are not.
TEST(CpuFlashBits, NanOfAnyPayloadAndSignStaysNan) {
  constexpr uint32_t kPayloads[] = {0x7fc00000, 0xffc00000, 0x7fc00001, 0x7fffffff,
                                    0xffffffff, 0x7f800001, 0xff812345, 0x7fc000aa};
  ForEachTarget([&] {
    for (const uint32_t payload : kPayloads) {
      const float nan = std::bit_cast<float>(payload);
      for (const char input : {'q', 'k', 'v', 'b', 's', 'a'}) {
        for (const float softcap : {0.0f, 5.0f}) {
          SCOPED_TRACE(std::string(1, input) + " " + std::to_string(payload));
          ProblemSpec spec = MakeSpec(1, 1, 1, 30, 150, 16, 16);
          spec.problem.mask.right = 0;
          spec.problem.softcap = softcap;
          spec.problem.has_bias = input == 'b';
          spec.problem.has_sinks = input == 's';
          spec.problem.has_alibi = input == 'a';
          OwnedAttention owned = MakeAttention(spec, FreshSeed());
          // Row 7 sees keys up to 127; keys from 128 on are seen from row 8 on.
          int64_t first = 8, last = 29, only = -1;
          const auto put = [nan](const void* at) {
            std::memcpy(const_cast<void*>(at), &nan, sizeof(nan));
          };
          if (input == 'q') put(owned.Q(0, 0, first = last = 9, 3));
          if (input == 'k') put(owned.K(0, 0, 128, 3));
          if (input == 'v') put(owned.V(0, 0, 128, only = 3));
          if (input == 'b') put(Bias(owned) + (first = last = 11) * 150 + 65);
          if (input == 's' || input == 'a') first = 0;
          if (input == 's') put(owned.attention.sinks);
          if (input == 'a') put(owned.attention.alibi_slopes);
          Flash(owned);
          for (int64_t i = 0; i < 30; ++i) {
            const bool sees = i >= first && i <= last;
            ASSERT_EQ(std::isnan(owned.attention.lse[i]), sees && only < 0) << i;
            for (int64_t d = 0; d < 16; ++d) {
              const float o = Get(owned.attention, owned.O(0, 0, i, d));
              ASSERT_EQ(std::isnan(o), sees && (only < 0 || d == only)) << i << " " << d;
            }
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace attend::test
