// SPDX-License-Identifier: Apache-2.0
//
// The check of gradients: those of both CPU kernels, from O and LSE of either, pass, planted faults
// fail, and the cost is bounded.

#include "kernels/reference/check_gradients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

using ::testing::HasSubstr;

constexpr double kAll = 1e12;

// A problem with its forward and backward pass.
struct Passes {
  Passes(ProblemSpec spec, uint64_t seed, bool reference_forward = false,
         bool reference_backward = false)
      : owned(Forward(std::move(spec), seed, reference_forward)),
        gradients(owned.attention, seed + 1) {
    if (reference_backward) {
      CpuReferenceGradients(owned.attention, gradients.get());
    } else {
      CpuFlashGradients(owned.attention, gradients.get());
    }
  }
  static OwnedAttention Forward(ProblemSpec spec, uint64_t seed, bool reference) {
    spec.problem.return_lse = true;
    OwnedAttention made = MakeAttention(spec, seed);
    const Attention* batch[] = {&made.attention};
    reference ? CpuReference(made.attention) : CpuFlash(batch);
    return made;
  }
  // The CPU kernels keep weights in fp32.
  RowsReport Check(double budget = kAll, bool weights_rounded = false) const {
    return CheckGradients(owned.attention, gradients.get(), 7, budget, nullptr, weights_rounded);
  }

  OwnedAttention owned;
  OwnedGradients gradients;
};

void ExpectCorrectGradientsPass(double budget) {
  const uint64_t seed = FreshSeed();
  const int rounds = static_cast<int>(160 * TestScale());
  for (int n = 0; n < rounds; ++n) {
    const uint64_t one = seed + static_cast<uint64_t>(n);
    ProblemSpec spec = RandomSpec(one, 4e4);
    if (n % 3 == 1) spec = WithDropout(std::move(spec), one);
    // With a higher rate O exceeds fp16's range, and rows with its Inf cannot be judged.
    constexpr int32_t kHalfDropoutMax = 65000;
    if (spec.problem.dtype == DType::kFloat16) {
      spec.problem.dropout = std::min(spec.problem.dropout, kHalfDropoutMax);
    }
    const Passes passes(spec, one, (n & 1) != 0, (n & 2) != 0);
    const RowsReport report = passes.Check(budget);
    EXPECT_TRUE(report.ok) << report.detail << "\n"
                           << Describe(passes.owned.attention.problem)
                           << " ATTEND_TEST_SEED=" << seed << " n " << n;
    if (report.rows_total < 1 << 16 && budget == kAll) {
      EXPECT_EQ(report.rows_checked, report.rows_total);
    }
    EXPECT_EQ(report.rows_unjudged, 0);
    EXPECT_TRUE(std::isfinite(report.max_abs_error) && std::isfinite(report.bound));
    EXPECT_LE(report.mean_abs_error, report.max_abs_error);
  }
}

TEST(CheckGradients, CorrectGradientsPass) { ExpectCorrectGradientsPass(kAll); }

// If the budget does not allow the softmax of all rows, the check uses O and LSE as given.
TEST(CheckGradients, CorrectGradientsPassWithOAndLseAsGiven) { ExpectCorrectGradientsPass(2e4); }

TEST(CheckGradients, ASampleStaysWithinTheBudget) {
  const uint64_t seed = FreshSeed();
  const Passes passes(MakeSpec(2, 4, 2, 150, 170, 32, 24, DType::kBFloat16), seed);
  const RowsReport report = passes.Check(9 * 20 * 300.0 * 300);
  EXPECT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed;
  EXPECT_EQ(report.rows_total, 2 * (4 * 150 + 2 * 2 * 170));
  EXPECT_GE(report.rows_checked, 3);
  EXPECT_LT(report.rows_checked, report.rows_total / 4);
  const RowsReport least = passes.Check(1);
  EXPECT_TRUE(least.ok);
  EXPECT_EQ(least.rows_checked, 3) << "one of each gradient";
}

// A wrong LSE in the request is reported as a fault of the inputs, even if it is not in the sample
// of O and LSE: for checked rows of dQ, the check computes the whole softmax.
TEST(CheckGradients, AWrongLseOutsideTheSampleIsAFaultOfTheInputs) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  const Passes passes(MakeSpec(1, 2, 1, 40, 40, 16, 16), seed);
  int blamed = 0;
  for (const float off : {0.1f, -3.0f, std::numeric_limits<float>::quiet_NaN()}) {
    for (int64_t i = 0; i < 40; ++i) {
      float& lse = passes.owned.attention.lse[i];
      const float right = std::exchange(lse, lse + off);
      CpuFlashGradients(passes.owned.attention, passes.gradients.get());
      const RowsReport report = passes.Check(9 * 4 * 40 * 192.0);  // four rows of each gradient
      EXPECT_TRUE(report.ok || report.of_inputs || report.undecided)
          << "row " << i << " off by " << off << ": " << report.detail;
      blamed += report.of_inputs ? 1 : 0;
      lse = right;
    }
  }
  EXPECT_GT(blamed, 0);
}

ProblemSpec WithEverything() {
  ProblemSpec spec = MakeSpec(2, 4, 2, 21, 26, 16, 8);
  spec.problem.has_bias = spec.problem.has_sinks = true;
  spec.bias_per_head = true;
  return spec;
}

void Spoil(const TensorView& view, int64_t b, int64_t h, int64_t row, float value) {
  static_cast<float*>(view.data)[b * view.stride_b + h * view.stride_h + row * view.stride_l + 3] =
      value;
}

TEST(CheckGradients, TheReportNamesTheFaultyElement) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  struct Fault {
    const char* name;
    void (*plant)(const Gradients&);
    const char* says;
  };
  const Fault faults[] = {
      {"dQ", [](const Gradients& g) { Spoil(g.d_q, 1, 3, 20, 0.5f); },
       "d_q of sequence 1, head 3, row 20, element 3 is 0.5"},
      {"dK", [](const Gradients& g) { Spoil(g.d_k, 0, 1, 25, 4); },
       "d_k of sequence 0, head 1, row 25"},
      {"dV", [](const Gradients& g) { Spoil(g.d_v, 1, 0, 0, -kNan); },
       "d_v of sequence 1, head 0, row 0"},
      {"dBias", [](const Gradients& g) { Spoil(g.d_bias, 0, 2, 0, 9); }, "d_bias of"},
      {"dSinks", [](const Gradients& g) { g.d_sinks[2] *= -1; }, "d_sinks of sequence 0, head 2"},
  };
  for (const Fault& fault : faults) {
    const uint64_t seed = FreshSeed();
    const Passes passes(WithEverything(), seed);
    ASSERT_TRUE(passes.Check().ok);
    fault.plant(passes.gradients.get());
    const RowsReport report = passes.Check();
    EXPECT_FALSE(report.ok) << fault.name << " ATTEND_TEST_SEED=" << seed;
    EXPECT_FALSE(report.of_inputs) << fault.name;
    EXPECT_THAT(report.detail, HasSubstr(fault.says));
  }
}

// A problem whose first rows have a finite mask on every key, as with left padding.
struct MaskedRows {
  MaskedRows(float mask, DType dtype, uint64_t seed) : owned(Make(mask, dtype, seed)) {
    const Attention* batch[] = {&owned.attention};
    CpuFlash(batch);
  }
  static OwnedAttention Make(float mask, DType dtype, uint64_t seed) {
    ProblemSpec spec = MakeSpec(1, 2, 1, 12, 40, 16, 16, dtype);
    spec.problem.has_bias = true;
    OwnedAttention made = MakeAttention(spec, seed);
    const BiasView& bias = made.attention.bias;
    for (int64_t row = 0; row < 2 * 12; ++row) {
      auto* const at = static_cast<float*>(const_cast<void*>(bias.data)) +
                       row / 12 * bias.stride_h + row % 12 * bias.stride_q;
      std::fill_n(at, 40, row % 12 < 3 ? mask : 0.0f);
    }
    return made;
  }
  OwnedAttention owned;
};

// Changes dV as if each weight of rows [0, 3) were 1, not 1/40: exp(score - LSE) is 1 if both are
// the mask's value in fp32.
void AddWhatSumsToN(const Attention& a, const Gradients& g) {
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t n = 0; n < 40 * 16; ++n) {
        const int64_t d_o = h * g.d_o.stride_h + i * g.d_o.stride_l + n % 16;
        const int64_t d_v = n / 16 * g.d_v.stride_l + n % 16;
        const DType dtype = a.problem.dtype;
        StoreElement(
            g.d_v.data, dtype, d_v,
            LoadElement(g.d_v.data, dtype, d_v) + LoadElement(g.d_o.data, dtype, d_o) * 39 / 40);
      }
    }
  }
}

// The weights of such rows are not determined in fp32, so these rows are not judged; that their
// weights sum to 1 is.
TEST(CheckGradients, OnlyTheSumOfFullyMaskedRowsIsJudged) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : kDTypes) {
    for (const float mask : {-1e9f, std::numeric_limits<float>::lowest()}) {
      for (const double budget : {kAll, 3e4}) {  // whole rows; and O and LSE as given
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " mask " + std::to_string(mask) +
                     " ATTEND_TEST_SEED=" + std::to_string(seed));
        const MaskedRows masked(mask, dtype, seed);
        const Attention& a = masked.owned.attention;
        OwnedGradients gradients(a, seed + 1);
        const Gradients& g = gradients.get();
        CpuFlashGradients(a, g);
        const RowsReport report = CheckGradients(a, g, 1, budget, nullptr, false);
        EXPECT_FALSE(report.ok);
        EXPECT_TRUE(report.undecided) << report.detail;
        EXPECT_GT(report.rows_unjudged, 0);
        EXPECT_GE(report.rows_wide, report.rows_unjudged);
        EXPECT_LE(report.rows_unjudged, report.rows_checked);
        EXPECT_TRUE(std::isfinite(report.bound));
        EXPECT_THAT(report.detail, HasSubstr("weights open"));
        AddWhatSumsToN(a, g);
        const RowsReport faulty = CheckGradients(a, g, 1, budget, nullptr, false);
        EXPECT_FALSE(faulty.ok || faulty.undecided || faulty.of_inputs);
        EXPECT_THAT(faulty.detail, HasSubstr("over the keys, must to"));
      }
    }
  }
}

// Weights of overflowing scores need not sum to 1, and O and LSE of another scale may be theirs.
TEST(CheckGradients, OverflowingScoresDoNotFail) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (int n = 0; n < 20; ++n) {
    OwnedAttention owned = MakeAttention(MakeSpec(2, 2, 2, 3, 13, 64, 3), seed + n);
    Attention& a = owned.attention;
    const Attention* batch[] = {&a};
    CpuFlash(batch);
    a.problem.scale = 3e38f;
    OwnedGradients gradients(a, seed + n);
    CpuFlashGradients(a, gradients.get());
    for (const double budget : {kAll, 3e2}) {  // whole rows; and O and LSE as given
      const RowsReport report = CheckGradients(a, gradients.get(), 1, budget, nullptr, false);
      EXPECT_FALSE(report.failed() && !report.of_inputs) << report.detail;
    }
  }
}

// If dO and dLSE of the masked rows are 0, the check is decided.
TEST(CheckGradients, FullyMaskedRowsOutsideTheLossAreJudged) {
  const uint64_t seed = FreshSeed();
  for (const double budget : {kAll, 3e4}) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
    const MaskedRows masked(-1e9f, DType::kFloat32, seed);
    const Attention& a = masked.owned.attention;
    OwnedGradients gradients(a, seed + 1);
    const Gradients& g = gradients.get();
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 3; ++i) {
        auto* const d_o = static_cast<float*>(const_cast<void*>(g.d_o.data));
        std::fill_n(d_o + h * g.d_o.stride_h + i * g.d_o.stride_l, 16, 0.0f);
        const_cast<float*>(g.d_lse)[h * a.lse_stride_h + i] = 0;
      }
    }
    CpuFlashGradients(a, g);
    const RowsReport report = CheckGradients(a, g, 1, budget, nullptr, false);
    EXPECT_TRUE(report.ok) << report.detail;
    EXPECT_EQ(report.rows_wide + report.rows_unjudged, 0);
  }
}

// The truth is the softmax over whole rows: a backward pass that uses an LSE off by 2^-9 is wrong.
TEST(CheckGradients, GradientsOfAWrongLseFail) {
  const uint64_t seed = FreshSeed();
  Passes passes(MakeSpec(1, 2, 1, 30, 50, 16, 16), seed);
  const Attention& a = passes.owned.attention;
  const std::vector<float> lse(a.lse, a.lse + 60);
  for (int64_t n = 0; n < 60; ++n) a.lse[n] += 0x1p-9f;
  CpuFlashGradients(a, passes.gradients.get());
  std::copy(lse.begin(), lse.end(), a.lse);
  const RowsReport report = passes.Check();
  EXPECT_FALSE(report.ok || report.undecided || report.of_inputs) << " ATTEND_TEST_SEED=" << seed;
}

// The row is not drawn at random: rows with NaN are checked first.
TEST(CheckGradients, UnwrittenRowsFailInTheSmallestSample) {
  const Passes passes(MakeSpec(1, 2, 2, 300, 300, 16, 16), FreshSeed());
  Spoil(passes.gradients.get().d_k, 0, 1, 133, std::numeric_limits<float>::quiet_NaN());
  const RowsReport report = passes.Check(1);
  EXPECT_FALSE(report.ok);
  EXPECT_THAT(report.detail, HasSubstr("d_k of sequence 0, head 1, row 133, element 3 is nan"));
}

TEST(CheckGradients, ARowOffByAThousandthFails) {
  const Passes passes(MakeSpec(1, 1, 1, 64, 64, 32, 32), FreshSeed());
  const TensorView& d_v = passes.gradients.get().d_v;
  for (int64_t d = 0; d < 32; ++d) static_cast<float*>(d_v.data)[9 * d_v.stride_l + d] *= 1.001f;
  EXPECT_THAT(passes.Check().detail, HasSubstr("d_v of sequence 0, head 0, row 9"));
}

TEST(CheckGradients, WrongOAndLseAreFaultsOfTheInputs) {
  for (const bool lse : {true, false}) {
    const Passes passes(MakeSpec(1, 2, 1, 40, 50, 16, 16), FreshSeed());
    const Attention& a = passes.owned.attention;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 40; ++i) {
        if (lse) a.lse[h * a.lse_stride_h + i] += 0.01f;
        if (!lse) Set(a, static_cast<float*>(a.o.data) + h * a.o.stride_h + i * a.o.stride_l, 3);
      }
    }
    // The backward pass itself is correct.
    CpuFlashGradients(a, passes.gradients.get());
    const RowsReport report = passes.Check();
    EXPECT_FALSE(report.ok);
    EXPECT_TRUE(report.of_inputs);
    EXPECT_THAT(report.detail, HasSubstr("O and LSE are not those of q, k and v"));
  }
}

TEST(CheckGradients, AStopFlagEndsTheCheckEarly) {
  const Passes passes(MakeSpec(1, 1, 1, 300, 300, 16, 16), FreshSeed());
  StopFlag stop;
  stop.Set();
  const RowsReport report =
      CheckGradients(passes.owned.attention, passes.gradients.get(), 1, kAll, &stop);
  EXPECT_LT(report.rows_checked, 10);
}

}  // namespace
}  // namespace attend::test
