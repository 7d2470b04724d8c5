// SPDX-License-Identifier: Apache-2.0
//
// The reference compared with an independent implementation of the formula in long double, and
// every edge case of the contract.

#include "kernels/reference/cpu_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The numbers of queries and keys of a sequence, from the length arrays.
struct Lengths {
  int64_t q = 0, k = 0;
};

Lengths LengthsOf(const ProblemSpec& spec, int64_t b) {
  const size_t n = static_cast<size_t>(b);
  return {spec.q_lengths.empty() ? spec.problem.len_q : spec.q_lengths[n],
          spec.kv_lengths.empty() ? spec.problem.len_k : spec.kv_lengths[n]};
}

// The score as defined in problem.h, or -inf if the mask hides the key.
long double NaiveScore(OwnedAttention& owned, const Lengths& len, int64_t b, int64_t h, int64_t i,
                       int64_t j) {
  const Attention& a = owned.attention;
  const Problem& p = a.problem;
  const int64_t offset = p.mask.alignment == Alignment::kTopLeft ? 0 : len.k - len.q;
  const int64_t distance = j - i - offset;
  if (p.mask.left >= 0 && distance < -p.mask.left) return -kInfinity;
  if (p.mask.right >= 0 && distance > p.mask.right) return -kInfinity;
  long double s = 0;
  const int64_t h_kv = h / (p.heads_q / p.heads_kv);
  for (int64_t d = 0; d < p.dim; ++d) {
    s += static_cast<long double>(Get(a, owned.Q(b, h, i, d))) *
         static_cast<long double>(Get(a, owned.K(b, h_kv, j, d)));
  }
  s *= static_cast<long double>(p.scale);
  if (p.softcap > 0) s = p.softcap * std::tanh(s / static_cast<long double>(p.softcap));
  if (p.has_bias) {
    s += static_cast<long double>(
        LoadElement(a.bias.data, a.bias.dtype,
                    b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j));
  }
  if (p.has_alibi) {
    s -= static_cast<long double>(a.alibi_slopes[b * a.alibi_stride_b + h]) *
         static_cast<long double>(std::abs(distance));
  }
  return s;
}

void NaiveRow(OwnedAttention& owned, const Lengths& len, int64_t b, int64_t h, int64_t i,
              std::vector<long double>* o, long double* lse) {
  const Attention& a = owned.attention;
  const Problem& p = a.problem;
  o->assign(static_cast<size_t>(p.dim_v), 0);
  *lse = -kInfinity;
  if (i >= len.q) return;
  std::vector<long double> scores;
  long double shift = p.has_sinks ? static_cast<long double>(a.sinks[h]) : -kInfinity;
  for (int64_t j = 0; j < len.k; ++j) {
    scores.push_back(NaiveScore(owned, len, b, h, i, j));
    shift = std::max(shift, scores.back());
  }
  if (shift == -kInfinity) return;
  long double sum = p.has_sinks ? std::exp(static_cast<long double>(a.sinks[h]) - shift) : 0;
  const int64_t h_kv = h / (p.heads_q / p.heads_kv);
  for (int64_t j = 0; j < len.k; ++j) {
    const long double weight = std::exp(scores[static_cast<size_t>(j)] - shift);
    if (weight == 0) continue;
    sum += weight;
    const DropoutPlace& place = a.dropout;
    if (!DropoutKeeps(p.dropout, place.seed, place.sequence + b, place.head + h, place.row + i,
                      p.key_offset + j)) {
      continue;
    }
    for (int64_t d = 0; d < p.dim_v; ++d) {
      (*o)[static_cast<size_t>(d)] +=
          weight * static_cast<long double>(Get(a, owned.V(b, h_kv, j, d)));
    }
  }
  *lse = shift + std::log(sum);
  for (long double& element : *o) element /= sum * (65536 - p.dropout) / 65536;
}

TEST(Reference, MatchesTheFormulaOverRandomProblems) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(300 * TestScale()); ++n) {
    ProblemSpec spec = RandomSpec(seed + n, 2e5);
    if (n % 2 == 1) spec = WithDropout(std::move(spec), seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed + n);
    const Problem& p = owned.attention.problem;
    std::vector<double> o(static_cast<size_t>(p.dim_v));
    std::vector<long double> naive;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Lengths len = LengthsOf(spec, b);
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < (p.packed ? len.q : p.len_q); ++i) {
          double lse = 0;
          long double naive_lse = 0;
          ReferenceRow(owned.attention, b, h, i, o.data(), &lse);
          NaiveRow(owned, len, b, h, i, &naive, &naive_lse);
          if (std::isinf(naive_lse)) {
            ASSERT_EQ(lse, static_cast<double>(naive_lse));
          } else {
            // In double precision, exp of scores up to 1e4 is off by a few 1e4 * 2^-53.
            ASSERT_NEAR(lse, static_cast<double>(naive_lse), 1e-10);
          }
          for (int64_t d = 0; d < p.dim_v; ++d) {
            const size_t at = static_cast<size_t>(d);
            const double size = std::max(1.0, std::abs(static_cast<double>(naive[at])));
            ASSERT_NEAR(o[at], static_cast<double>(naive[at]), 1e-10 * size)
                << b << " " << h << " " << i;
          }
        }
      }
    }
  }
}

TEST(Reference, OIsEachRowRoundedOnce) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    OwnedAttention owned = MakeAttention(MakeSpec(2, 4, 2, 9, 17, 16, 24, dtype), seed);
    CpuReference(owned.attention);
    EXPECT_TRUE(owned.GuardsIntact());
    std::vector<double> o(24);
    for (int64_t i = 0; i < 9; ++i) {
      double lse = 0;
      ReferenceRow(owned.attention, 1, 3, i, o.data(), &lse);
      for (int64_t d = 0; d < 24; ++d) {
        const double stored = static_cast<double>(Get(owned.attention, owned.O(1, 3, i, d)));
        // Rounded to nearest: off by at most u relative to the value, or half a subnormal step.
        const double subnormal = dtype == DType::kFloat16 ? 0x1p-25 : 0;
        EXPECT_LE(std::abs(stored - o[static_cast<size_t>(d)]),
                  std::max(subnormal, UnitRoundoff(dtype) * std::abs(o[static_cast<size_t>(d)])))
            << "ATTEND_TEST_SEED=" << seed;
      }
    }
  }
}

TEST(Reference, RowsWithoutKeysAreZeroWithLseMinusInfinity) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 5, 3, 8, 8);
  spec.problem.mask.right = 0;  // bottom-right with Lk < Lq: rows 0 and 1 see nothing
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  double o[8];
  double lse = 0;
  for (int64_t i = 0; i < 5; ++i) {
    ReferenceRow(owned.attention, 0, 1, i, o, &lse);
    EXPECT_EQ(std::isinf(lse), i < 2) << i;
    for (const double element : o) EXPECT_EQ(element == 0, i < 2);
  }
  spec = MakeSpec(1, 1, 1, 2, 0, 8, 8);
  const OwnedAttention no_keys = MakeAttention(spec, FreshSeed());
  ReferenceRow(no_keys.attention, 0, 0, 1, o, &lse);
  EXPECT_EQ(lse, -kInfinity);
  EXPECT_EQ(o[7], 0);
}

TEST(Reference, RowsWithOnlyASinkAreZeroWithItsLogitAsLse) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 1, 4, 8, 8);
  spec.problem.has_sinks = spec.problem.has_bias = true;
  spec.bias_masked_share = 1;
  const OwnedAttention owned = MakeAttention(spec, FreshSeed());
  double o[8];
  double lse = 0;
  ReferenceRow(owned.attention, 0, 1, 0, o, &lse);
  EXPECT_EQ(lse, static_cast<double>(owned.attention.sinks[1]));
  for (const double element : o) EXPECT_EQ(element, 0);
}

TEST(Reference, PaddingRowsAreZeroEvenWithASink) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 4, 4, 8, 8);
  spec.problem.has_sinks = true;
  spec.q_lengths = {2};
  const OwnedAttention owned = MakeAttention(spec, FreshSeed());
  double o[8];
  double lse = 0;
  ReferenceRow(owned.attention, 0, 0, 2, o, &lse);
  EXPECT_EQ(lse, -kInfinity);
  EXPECT_EQ(o[0], 0);
}

TEST(Reference, NanReachesOnlyRowsThatSeeIt) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 8, 8, 4, 4);
  spec.problem.mask.right = 0;
  for (const bool in_v : {false, true}) {
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    Set(owned.attention, in_v ? owned.V(0, 0, 5, 1) : owned.K(0, 0, 5, 1), kNan);
    double o[4];
    double lse = 0;
    for (int64_t i = 0; i < 8; ++i) {
      ReferenceRow(owned.attention, 0, 0, i, o, &lse);
      EXPECT_EQ(std::isnan(o[1]), i >= 5);
      EXPECT_EQ(std::isnan(o[0]), i >= 5 && !in_v);  // V's other columns are clean
      EXPECT_EQ(std::isnan(lse), i >= 5 && !in_v);
    }
  }
}

// A dropped weight adds nothing to O, even if the value is NaN; LSE is as without dropout.
TEST(Reference, DroppedWeightsAddNothing) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 9, 40, 4, 4);
  spec.problem.dropout = 32768;
  spec.dropout = {.seed = 5, .row = 3};
  OwnedAttention owned = MakeAttention(spec, 1);
  OwnedAttention without = MakeAttention(MakeSpec(1, 2, 1, 9, 40, 4, 4), 1);
  Set(owned.attention, owned.V(0, 0, 17, 1), kNan);
  int kept = 0;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 9; ++i) {
      double o[4], o_without[4];
      double lse = 0, lse_without = 0;
      ReferenceRow(owned.attention, 0, h, i, o, &lse);
      ReferenceRow(without.attention, 0, h, i, o_without, &lse_without);
      EXPECT_EQ(lse, lse_without);
      const bool keeps = DropoutKeeps(32768, spec.dropout.seed, 0, h, i + 3, 17);
      EXPECT_EQ(std::isnan(o[1]), keeps);
      EXPECT_TRUE(std::isfinite(o[0]));
      kept += keeps ? 1 : 0;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, 18);
}

TEST(Reference, InfinityInVFollowsIeee) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 3, 4, 4), FreshSeed());
  Set(owned.attention, owned.V(0, 0, 1, 0), std::numeric_limits<float>::infinity());
  Set(owned.attention, owned.V(0, 0, 1, 1), std::numeric_limits<float>::infinity());
  Set(owned.attention, owned.V(0, 0, 2, 1), -std::numeric_limits<float>::infinity());
  double o[4];
  double lse = 0;
  ReferenceRow(owned.attention, 0, 0, 0, o, &lse);
  EXPECT_EQ(o[0], kInfinity);
  EXPECT_TRUE(std::isnan(o[1]));
  EXPECT_TRUE(std::isfinite(o[2]));
}

TEST(Reference, DoesNotRoundTwice) {
  // One key: O is V exactly. Two equal keys: O is the exact mean, a tie in bfloat16 plus a bit too
  // small for float. Rounded through float it would fall on the tie and go down.
  OwnedAttention owned =
      MakeAttention(MakeSpec(1, 1, 1, 1, 1, 1, 1, DType::kBFloat16), FreshSeed());
  Set(owned.attention, owned.V(0, 0, 0, 0), 1.5f);
  CpuReference(owned.attention);
  EXPECT_EQ(Get(owned.attention, owned.O(0, 0, 0, 0)), 1.5f);

  ProblemSpec spec = MakeSpec(1, 1, 1, 1, 2, 1, 1, DType::kBFloat16);
  spec.problem.has_bias = true;
  OwnedAttention tie = MakeAttention(spec, FreshSeed());
  float* bias = const_cast<float*>(static_cast<const float*>(tie.attention.bias.data));
  Set(tie.attention, tie.Q(0, 0, 0, 0), 0);
  Set(tie.attention, tie.V(0, 0, 0, 0), 1);
  Set(tie.attention, tie.V(0, 0, 1, 0), 1 + 0x1p-7f);  // bfloat16's next value
  // The second key's weight is slightly above one half: O is above the tie by about 2^-8 * 2^-28.
  bias[0] = 0;
  bias[1] = 0x1p-26f;
  CpuReference(tie.attention);
  EXPECT_EQ(Get(tie.attention, tie.O(0, 0, 0, 0)), 1 + 0x1p-7f);
}

}  // namespace
}  // namespace attend::test
