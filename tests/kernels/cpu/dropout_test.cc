// SPDX-License-Identifier: Apache-2.0
//
// Dropout in cpu_flash, for every instruction set of this machine: the dropped weights are those of
// the contract, in any tile, slice or pass. The random sweeps of flash_test and
// flash_gradients_test have dropout too.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/dropout_factor.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Flash(const Attention& a) {
  const Attention* batch[] = {&a};
  CpuFlash(batch);
}

float At(const TensorView& t, int64_t b, int64_t h, int64_t row, int64_t d) {
  return static_cast<const float*>(t.data)[b * t.stride_b + h * t.stride_h + row * t.stride_l + d];
}

// V is the unit matrix, so O shows each weight; so is dO, and dV shows them. Both in fp32, dense,
// with at most 256 rows and keys.
void ExpectWeightsAsDropped(const ProblemSpec& spec, uint64_t seed) {
  OwnedAttention owned = MakeAttention(spec, seed);
  const Attention& a = owned.attention;
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t n = 0; n < p.heads_kv * p.len_k * p.dim_v; ++n) {
      const int64_t h = n / p.dim_v / p.len_k, j = n / p.dim_v % p.len_k, d = n % p.dim_v;
      Set(a, owned.V(b, h, j, d), j == d ? 1.0f : 0.0f);
    }
  }
  Flash(a);
  OwnedGradients gradients(a, seed);
  Gradients& g = gradients.get();
  for (int64_t n = 0; n < p.batch * p.heads_q * p.len_q * p.dim_v; ++n) {
    const int64_t i = n / p.dim_v % p.len_q, d = n % p.dim_v;
    static_cast<float*>(const_cast<void*>(g.d_o.data))[n] = i == d ? 1.0f : 0.0f;
  }
  CpuFlashGradients(a, g);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.len_q; ++i) {
        const KeyRange keys = VisibleKeys(p.mask, SequenceOf(a, b), i);
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          const bool keeps = DropoutFactor(a, {b, h, i}, j) != 0;
          ASSERT_EQ(At(a.o, b, h, i, j) != 0, keeps) << b << " " << h << " " << i << " " << j;
          if (p.group() > 1) continue;
          ASSERT_NEAR(At(g.d_v, b, h, j, i), At(a.o, b, h, i, j), 1e-5f * At(a.o, b, h, i, j))
              << b << " " << h << " " << i << " " << j;
        }
      }
    }
  }
}

TEST(CpuDropout, EveryWeightIsDroppedOrKeptAsTheContractSays) {
  const uint64_t seed = FreshSeed();
  ForEachTarget([&] {
    for (const int64_t row : {0, 16, 5, 8, 31}) {
      for (const int64_t key : {0, 16, 1, 8, 29}) {
        for (const auto& [heads_kv, group, len_q, len_k] :
             {std::tuple{1, 1, 150, 170}, {2, 3, 20, 70}, {1, 4, 48, 33}, {2, 1, 1, 256}}) {
          const int64_t dim_v = std::max(len_q, len_k);
          ProblemSpec spec = MakeSpec(2, heads_kv * group, heads_kv, len_q, len_k, 8, dim_v);
          spec.problem.dropout = 26000;
          spec.problem.key_offset = key;
          if (len_q > 100) spec.problem.mask = {Alignment::kBottomRight, 70, 0};
          spec.dropout = {.seed = seed, .sequence = 3, .head = 7, .row = row};
          SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
          ExpectWeightsAsDropped(spec, seed);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

// Far from the beginning, where counters use all their bits.
TEST(CpuDropout, SlicesAtAnyOffsetAreRight) {
  ProblemSpec spec = MakeSpec(2, 2, 2, 40, 50, 8, 50);
  spec.problem.dropout = 26000;
  spec.problem.key_offset = (int64_t{1} << 30) - 70;
  spec.dropout = {.seed = ~uint64_t{0},
                  .sequence = (int64_t{1} << 20) - 2,
                  .head = (int64_t{1} << 16) - 2,
                  .row = (int64_t{1} << 30) - 45};
  ExpectWeightsAsDropped(spec, 1);
}

TEST(CpuDropout, SlicesHaveTheBitsOfTheWhole) {
  const uint64_t seed = FreshSeed();
  for (const bool causal : {false, true}) {
    ProblemSpec spec = MakeSpec(2, 6, 2, 100, 130, 24, 40, DType::kBFloat16);
    if (causal) spec.problem.mask.right = 0;
    spec.problem.dropout = 20000;
    spec.dropout = {.seed = seed, .sequence = 1, .row = 7};
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed);
    Flash(owned.attention);
    const std::vector<std::byte> whole = owned.OutputBytes();
    owned.ResetOutput();
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 13}, {13, 64}, {64, 100}}) {
          Flash(TakeSlice(owned.attention, {b, b + 1, h, h + 1, begin, end}).value());
        }
      }
    }
    EXPECT_EQ(owned.OutputBytes(), whole);
  }
}

// LSE covers all weights.
TEST(CpuDropout, LseDoesNotDependOnDropout) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 70, 200, 16, 24);
  spec.problem.has_sinks = true;
  const OwnedAttention without = MakeAttention(spec, 1);
  Flash(without.attention);
  for (const int32_t dropout : {1, 30000, 65535}) {
    spec.problem.dropout = dropout;
    const OwnedAttention owned = MakeAttention(spec, 1);
    Flash(owned.attention);
    EXPECT_EQ(std::memcmp(owned.attention.lse, without.attention.lse, 2 * 70 * sizeof(float)), 0);
  }
}

// NaN and Inf in a value affect the rows that keep its weight; the other rows' bits are the same as
// with a finite value.
TEST(CpuDropout, ValuesOfDroppedWeightsHaveNoEffect) {
  const uint64_t seed = FreshSeed();
  for (const float poison : {kNan, kInfinity}) {
    ProblemSpec spec = MakeSpec(1, 2, 1, 100, 150, 16, 16);
    spec.problem.dropout = 32768;
    spec.problem.mask.right = 0;
    spec.dropout = {.seed = seed, .row = 3};
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
    OwnedAttention clean = MakeAttention(spec, seed);
    OwnedAttention dirty = MakeAttention(spec, seed);
    Set(dirty.attention, dirty.V(0, 0, 77, 5), poison);
    Flash(clean.attention);
    Flash(dirty.attention);
    const RowsReport report = CheckAllRows(dirty.attention);
    EXPECT_TRUE(report.ok) << report.detail;
    for (int64_t n = 0; n < 2 * 100; ++n) {
      const RowId id{0, n / 100, n % 100};
      const bool feels = id.i + 50 >= 77 && DropoutFactor(dirty.attention, id, 77) != 0;
      for (int64_t d = 0; d < 16; ++d) {
        const float got = Get(dirty.attention, dirty.O(0, id.h, id.i, d));
        if (feels && d == 5) {
          ASSERT_FALSE(std::isfinite(got)) << id.h << " " << id.i;
        } else {
          ASSERT_EQ(got, Get(clean.attention, clean.O(0, id.h, id.i, d))) << id.h << " " << id.i;
        }
      }
    }
    OwnedGradients gradients(dirty.attention, seed);
    CpuFlashGradients(dirty.attention, gradients.get());
    EXPECT_EQ(GradientsJudge(dirty.attention, gradients.get()).Fault(gradients.get()), "");
  }
}

// NaN and Inf in a row of dO affect dV of the keys whose weight the row keeps, only in its column.
TEST(CpuDropout, GradientsOfDroppedWeightsHaveNoEffect) {
  const uint64_t seed = FreshSeed();
  for (const float poison : {kNan, kInfinity}) {
    for (const bool causal : {false, true}) {
      ProblemSpec spec = MakeSpec(1, 2, 2, 100, 150, 16, 16);
      spec.problem.dropout = 32768;
      if (causal) spec.problem.mask.right = 0;
      spec.dropout = {.seed = seed, .row = 3};
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
      OwnedAttention owned = MakeAttention(spec, seed);
      const Attention& a = owned.attention;
      Flash(a);
      OwnedGradients gradients(a, seed);
      const Gradients& g = gradients.get();
      const RowId row{0, 1, 60};
      const int64_t at = row.h * g.d_o.stride_h + row.i * g.d_o.stride_l + 5;
      static_cast<float*>(const_cast<void*>(g.d_o.data))[at] = poison;
      CpuFlashGradients(a, g);
      EXPECT_EQ(GradientsJudge(a, g).Fault(g), "");
      const KeyRange seen = VisibleKeys(a.problem.mask, SequenceOf(a, 0), row.i);
      for (int64_t n = 0; n < 2 * 150 * 16; ++n) {
        const int64_t h = n / 16 / 150, j = n / 16 % 150, d = n % 16;
        const bool sees = h == row.h && d == 5 && j >= seen.begin && j < seen.end;
        const bool feels = sees && DropoutFactor(a, row, j) != 0;
        ASSERT_NE(std::isfinite(At(g.d_v, 0, h, j, d)), feels) << h << " " << j << " " << d;
      }
    }
  }
}

// The output gradients are so small that dP's sums consist of subnormal numbers, which are rounded
// before dropout's factor, and dQ's and dK's before they are scaled. The scores are the same for
// all scales.
void ExpectTinyLossesJudged(int32_t dropout, int64_t keys, float scale) {
  const uint64_t seed = FreshSeed();
  ProblemSpec spec = MakeSpec(1, 4, 4, 64, keys, 16, 16);
  spec.problem.dropout = dropout;
  spec.problem.scale = scale;
  spec.problem.softcap = keys == 5 ? 1 : 0;
  spec.dropout.seed = seed;
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
  OwnedAttention owned = MakeAttention(spec, seed);
  const Attention& a = owned.attention;
  for (int64_t n = 0; n < 4 * keys * 16; ++n) {
    static_cast<float*>(const_cast<void*>(a.k.data))[n] *= 0.25f / scale;
  }
  Flash(a);
  OwnedGradients gradients(a, seed);
  const Gradients& g = gradients.get();
  for (int64_t n = 0; n < 4 * 64 * 16; ++n) {
    static_cast<float*>(const_cast<void*>(g.d_o.data))[n] *= 0x1p-142f;
  }
  for (int64_t n = 0; n < 4 * 64; ++n) const_cast<float*>(g.d_lse)[n] *= 0x1p-142f;
  CpuFlashGradients(a, g);
  EXPECT_EQ(GradientsJudge(a, g).Fault(g), "");
  EXPECT_EQ(CheckGradients(a, g, seed, 1e12).detail, "");
}

TEST(CpuDropout, GradientsOfTinyLossesAreWithinBounds) {
  ForEachTarget([] {
    for (const int32_t dropout : {0, 32768, 64880}) {
      for (const int64_t keys : {2, 5, 40}) {
        for (const float scale : {0.01f, 0.25f, 100.0f}) {
          ExpectTinyLossesJudged(dropout, keys, scale);
        }
      }
    }
  });
}

// Sums over keys leave fp32's range, but O does not; or it does, only through dropout's factor.
TEST(CpuDropout, TheLargestValuesOverflowOnlyWhereTheyMust) {
  const uint64_t seed = FreshSeed();
  for (const float value : {1e38f, 3e38f}) {
    for (const int64_t keys : {2, 3, 64, 300}) {
      for (const int32_t dropout : {6000, 32768}) {
        ProblemSpec spec = MakeSpec(1, 1, 1, 40, keys, 4, 8);
        spec.problem.dropout = dropout;
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
        OwnedAttention owned = MakeAttention(spec, seed);
        for (int64_t j = 0; j < keys; ++j) Set(owned.attention, owned.V(0, 0, j, 3), value);
        Flash(owned.attention);
        const RowsReport report = CheckAllRows(owned.attention);
        EXPECT_TRUE(report.ok) << report.detail;
      }
    }
  }
}

// The judges detect it if other weights are dropped, or the same ones at another rate.
TEST(CpuDropout, DroppingOtherWeightsIsDetected) {
  for (const DType dtype : kDTypes) {
    ProblemSpec spec = MakeSpec(1, 2, 1, 60, 90, 16, 16, dtype);
    spec.problem.dropout = 20000;
    spec.dropout.seed = 5;
    const OwnedAttention owned = MakeAttention(spec, 1);
    const Attention& a = owned.attention;
    OwnedGradients gradients(a, 1);
    std::vector<Attention> others(6, a);
    ++others[0].dropout.seed;
    ++others[1].dropout.sequence;
    ++others[2].dropout.head;
    ++others[3].dropout.row;
    ++others[4].problem.key_offset;
    others[5].problem.dropout += 65;
    for (const Attention& other : others) {
      SCOPED_TRACE(std::string(DTypeName(dtype)) + " " + std::to_string(&other - others.data()));
      Flash(other);
      EXPECT_FALSE(CheckAllRows(a).ok);
      Flash(a);
      EXPECT_TRUE(CheckAllRows(a).ok);
      CpuFlashGradients(other, gradients.get());
      EXPECT_NE(GradientsJudge(a, gradients.get()).Fault(gradients.get()), "");
      const RowsReport report = CheckGradients(a, gradients.get(), 1, 1e12);
      EXPECT_FALSE(report.ok);
      EXPECT_FALSE(report.of_inputs) << report.detail;
    }
    CpuFlashGradients(a, gradients.get());
    EXPECT_TRUE(CheckGradients(a, gradients.get(), 1, 1e12).ok);
  }
}

}  // namespace
}  // namespace attend::test
