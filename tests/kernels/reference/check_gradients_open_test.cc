// SPDX-License-Identifier: Apache-2.0
//
// The check of gradients in special cases: parts of the keys, NaN and Inf, dropped peaks, and
// removed keys.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

using ::testing::HasSubstr;

constexpr double kAll = 1e12;

OwnedAttention Forward(ProblemSpec spec, uint64_t seed) {
  spec.problem.return_lse = true;
  OwnedAttention made = MakeAttention(spec, seed);
  const Attention* batch[] = {&made.attention};
  CpuFlash(batch);
  return made;
}

RowsReport Judge(const Attention& a, const Gradients& g, double budget = kAll) {
  return CheckGradients(a, g, 7, budget, nullptr, false);
}

float* Element(const TensorView& view, int64_t h, int64_t row, int64_t d) {
  return static_cast<float*>(view.data) + h * view.stride_h + row * view.stride_l + d;
}

// Keys [20, 45) of 60, with O and LSE of the whole.
Attention PartOf(const Attention& whole) {
  Attention part = whole;
  part.problem.key_offset = 20;
  part.problem.len_k = 25;
  part.problem.keys_after = 15;
  const auto move = [](ConstTensorView* view) {
    view->data = static_cast<const float*>(view->data) + 20 * view->stride_l;
  };
  move(&part.k);
  move(&part.v);
  return part;
}

TEST(CheckGradientsOpen, PartsOfTheKeysAreJudgedByTheSoftmaxOfTheWhole) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 4, 2, 30, 60, 16, 8);
  spec.problem.mask.right = 0;
  const OwnedAttention owned = Forward(spec, seed);
  const Attention part = PartOf(owned.attention);
  OwnedGradients gradients(part, seed + 1);
  const Gradients& g = gradients.get();
  for (const bool reference : {false, true}) {
    reference ? CpuReferenceGradients(part, g) : CpuFlashGradients(part, g, nullptr);
    for (const double budget : {kAll, 2e4}) {
      const RowsReport report = Judge(part, g, budget);
      EXPECT_TRUE(report.ok) << report.detail;
    }
  }
  // Gradients of the part's own softmax are wrong.
  Attention alone = part;
  alone.problem.key_offset = alone.problem.keys_after = 0;
  alone.problem.mask.right = -1;
  CpuReferenceGradients(alone, g);
  EXPECT_TRUE(Judge(part, g).failed());
}

// If all rows see NaN or Inf in K or V, every row of dQ has to be NaN or Inf.
TEST(CheckGradientsOpen, FiniteGradientsOfNanAndInfFail) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const bool of_k : {true, false}) {
    for (const float special :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 20, 30, 16, 16), seed);
      Attention& a = owned.attention;
      a.problem.return_lse = true;
      const ConstTensorView& view = of_k ? a.k : a.v;
      *(static_cast<float*>(const_cast<void*>(view.data)) + 5 * view.stride_l + 3) = special;
      const Attention* batch[] = {&a};
      CpuFlash(batch);
      OwnedGradients gradients(a, seed + 1);
      const Gradients& g = gradients.get();
      CpuFlashGradients(a, g, nullptr);
      EXPECT_TRUE(Judge(a, g).ok) << Judge(a, g).detail;
      for (int64_t d = 0; d < 16; ++d) *Element(g.d_q, 0, 11, d) = 0;
      const RowsReport report = Judge(a, g);
      EXPECT_TRUE(report.failed());
      EXPECT_THAT(report.detail, HasSubstr("d_q of sequence 0, head 0, row 11"));
    }
  }
}

// One key has nearly all the weight and may be dropped. The rounding of scores moves little weight
// to the other keys, however much their dP differs.
TEST(CheckGradientsOpen, PeakedRowsWithDropoutPass) {
  const uint64_t seed = FreshSeed();
  const int rounds = static_cast<int>(60 * TestScale());
  for (int n = 0; n < rounds; ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " n " + std::to_string(n));
    ProblemSpec spec = MakeSpec(1, 2, 1, 9, 7, 8, 8);
    spec.problem.has_alibi = true;
    spec.problem.dropout = 58982;  // 0.9
    const uint64_t one = seed + static_cast<uint64_t>(n);
    OwnedAttention owned = MakeAttention(spec, one);
    Attention& a = owned.attention;
    a.problem.return_lse = true;
    std::fill_n(const_cast<float*>(a.alibi_slopes), 2, 100.0f);
    const Attention* batch[] = {&a};
    CpuFlash(batch);
    OwnedGradients gradients(a, one + 1);
    CpuFlashGradients(a, gradients.get(), nullptr);
    const RowsReport report = Judge(a, gradients.get());
    EXPECT_TRUE(report.ok) << report.detail;
  }
}

// fp32 may have NaN or Inf where double has neither: rows of such sums cannot be judged, and are
// not counted as wrong.
TEST(CheckGradientsOpen, SumsBeyondFp32sRangeAreUndecided) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  struct Case {
    const char* what;
    float k = 1, d_o = 1, scale = 1, slope = 0, bias = 0;
  };
  const float inf = std::numeric_limits<float>::infinity();
  for (const Case& c :
       {Case{.what = "scores that overflow under a bias of -inf", .k = 3e38f, .bias = -inf},
        Case{.what = "dS K overflows, and a scale of 0 follows",
        .k = 1e38f,
        .d_o = 1e3f,
        .scale = 0},
        Case{.what = "the score of a key with Inf overflows to -inf", .slope = 3e38f}}) {
    SCOPED_TRACE(c.what);
    ProblemSpec spec = MakeSpec(1, 1, 1, 9, 4, 8, 8);
    spec.problem.scale = c.scale;
    spec.problem.has_alibi = c.slope > 0;
    spec.problem.has_bias = c.bias < 0;
    OwnedAttention owned = MakeAttention(spec, seed);
    Attention& a = owned.attention;
    a.problem.return_lse = true;
    const auto each = [](const ConstTensorView& view, int64_t rows, const auto& change) {
      for (int64_t n = 0; n < rows * 8; ++n) {
        float& x =
            *(static_cast<float*>(const_cast<void*>(view.data)) + n / 8 * view.stride_l + n % 8);
        x = change(x);
      }
    };
    each(a.k, 4, [&](float x) { return std::copysign(std::abs(c.k), x); });
    if (c.slope > 0) {
      *const_cast<float*>(a.alibi_slopes) = c.slope;
      *static_cast<float*>(const_cast<void*>(a.v.data)) = inf;
    }
    if (c.bias < 0) {
      for (int64_t i = 0; i < 9; ++i) {
        std::fill_n(static_cast<float*>(const_cast<void*>(a.bias.data)) + i * a.bias.stride_q, 4,
                    c.bias);
      }
    }
    const Attention* batch[] = {&a};
    CpuFlash(batch);
    OwnedGradients gradients(a, seed + 1);
    const Gradients& g = gradients.get();
    if (c.d_o > 1) each(g.d_o, 9, [&](float x) { return std::copysign(c.d_o, x); });
    CpuFlashGradients(a, g, nullptr);
    const RowsReport report = Judge(a, g);
    EXPECT_FALSE(report.failed()) << report.detail;
  }
}

// A key whose score fp32 may have as -inf has no weight in a row that is NaN.
TEST(CheckGradientsOpen, VanishedKeysOfANanRowAreUndecided) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 1, 1, 3, 9, 8, 8);
  spec.problem.has_alibi = spec.problem.has_sinks = true;
  OwnedAttention owned = MakeAttention(spec, seed);
  Attention& a = owned.attention;
  a.problem.return_lse = true;
  *const_cast<float*>(a.alibi_slopes) = 3e38f;
  *const_cast<float*>(a.sinks) = std::numeric_limits<float>::quiet_NaN();
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed + 1);
  CpuFlashGradients(a, gradients.get(), nullptr);
  const RowsReport report = Judge(a, gradients.get());
  EXPECT_FALSE(report.failed()) << report.detail;
}

// Rows whose scores all vanish in fp32 have an LSE of -inf, but weights in double.
TEST(CheckGradientsOpen, VanishedRowsThatAreTakenAsGivenAreUndecided) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 2, 1, 70, 65, 64, 64);
  spec.problem.has_alibi = true;
  OwnedAttention owned = MakeAttention(spec, seed);
  Attention& a = owned.attention;
  a.problem.return_lse = true;
  std::fill_n(const_cast<float*>(a.alibi_slopes), 2, 3.4e38f);
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed + 1);
  CpuReferenceGradients(a, gradients.get());
  for (const double budget : {kAll, 1e6, 1e5}) {
    const RowsReport report = Judge(a, gradients.get(), budget);
    EXPECT_FALSE(report.failed()) << report.detail;
  }
}

// For a part of the keys, whose rows are taken as given: 0 times NaN is NaN.
TEST(CheckGradientsOpen, ADOOf0DoesNotHideANan) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 1, 1, 3, 9, 8, 8);
  spec.problem.key_offset = 7;
  OwnedAttention owned = MakeAttention(spec, seed);
  Attention& a = owned.attention;
  a.problem.return_lse = true;
  *static_cast<float*>(const_cast<void*>(a.v.data)) = std::numeric_limits<float>::quiet_NaN();
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed + 1);
  const Gradients& g = gradients.get();
  for (int64_t i = 0; i < 3; ++i) {
    std::fill_n(static_cast<float*>(const_cast<void*>(g.d_o.data)) + i * g.d_o.stride_l, 8, 0.0f);
  }
  std::fill_n(const_cast<float*>(g.d_lse), 3, 0.0f);
  CpuFlashGradients(a, g, nullptr);
  const RowsReport report = Judge(a, g);
  EXPECT_FALSE(report.failed()) << report.detail;
}

// A subnormal O of fp16 is off by a share of a step, not of itself.
TEST(CheckGradientsOpen, GradientsFromASubnormalOPass) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 70, 130, 64, 64, DType::kFloat16), seed);
  Attention& a = owned.attention;
  a.problem.return_lse = true;
  const auto scale = [](const void* data, int64_t begin, float by) {
    for (int64_t n = begin; n < begin + 64; ++n) {
      const float x = LoadElement(data, DType::kFloat16, n);
      StoreElement(const_cast<void*>(data), DType::kFloat16, n, x * by);
    }
  };
  for (int64_t j = 0; j < 130; ++j) scale(a.v.data, j * a.v.stride_l, 0x1p-20f);
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed + 1);
  Gradients& g = gradients.get();
  g.d_lse = nullptr;
  for (int64_t n = 0; n < 140; ++n) {
    scale(g.d_o.data, n / 70 * g.d_o.stride_h + n % 70 * g.d_o.stride_l, 0x1p10f);
  }
  CpuReferenceGradients(a, g);
  for (const double budget : {kAll, 1e6, 1e5}) {
    const RowsReport report = Judge(a, g, budget);
    EXPECT_TRUE(report.ok) << report.detail;
  }
}

// A key that a mask of bits removes for every row must not loosen the bound, however large it is.
TEST(CheckGradientsOpen, RemovedKeysDoNotMakeTheCheckUndecided) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 2, 1, 200, 200, 32, 32);
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kBit;
  spec.bias_per_sequence = spec.bias_per_head = spec.bias_per_query = false;
  OwnedAttention owned = MakeAttention(spec, seed);
  Attention& a = owned.attention;
  a.problem.return_lse = true;
  auto* const bits = static_cast<uint8_t*>(const_cast<void*>(a.bias.data));
  std::fill_n(bits, 200 / 8, uint8_t{0xff});
  bits[199 / 8] &= static_cast<uint8_t>(~(1 << 199 % 8));
  *(static_cast<float*>(const_cast<void*>(a.k.data)) + 199 * a.k.stride_l) = 1e8f;
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed + 1);
  CpuFlashGradients(a, gradients.get(), nullptr);
  const RowsReport report = Judge(a, gradients.get(), 1e6);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_LT(report.rows_checked, report.rows_total);
}

}  // namespace
}  // namespace attend::test
