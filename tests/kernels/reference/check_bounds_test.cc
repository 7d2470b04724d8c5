// SPDX-License-Identifier: Apache-2.0
//
// How tight the check's bounds are: small faults beside masks are found with every CPU kernel, the
// kernels' own answers to arbitrary bit patterns pass, and every bound is finite.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/flash.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/allocation_meter.h"
#include "tests/kernels/support/bit_patterns.h"
#include "tests/kernels/support/planted_faults.h"

namespace attend::test {
namespace {

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool Flash(OwnedAttention* owned) {
  const Attention* batch[] = {&owned->attention};
  CpuFlash(batch);
  return true;
}
bool Reference(OwnedAttention* owned) {
  CpuReference(owned->attention);
  return true;
}

class CheckBoundsTest : public testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, CheckBoundsTest,
                         testing::Values(DType::kFloat16, DType::kBFloat16, DType::kFloat32),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

TEST_P(CheckBoundsTest, SmallFaultsBesideMasksFailInTheReference) {
  ExpectPlantedFaultsCaught(GetParam(), Reference);
}

TEST_P(CheckBoundsTest, SmallFaultsBesideMasksFailInCpuFlash) {
  ExpectPlantedFaultsCaught(GetParam(), Flash);
}

TEST_P(CheckBoundsTest, SmallFaultsInLongRowsFail) {
  ExpectLongRowFaultsCaught(GetParam(), Reference);
  ExpectLongRowFaultsCaught(GetParam(), Flash);
}

TEST_P(CheckBoundsTest, FullyMaskedRowsAreWideAndStayInTheRangeOfV) {
  ExpectWideRowsStayInRange(GetParam(), Reference);
  ExpectWideRowsStayInRange(GetParam(), Flash);
}

// Requires that answers of `run` to inputs of arbitrary bits pass.
void ExpectAnyBitsPass(uint64_t count, bool (*run)(OwnedAttention*)) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = seed; n < seed + count; ++n) {
    ProblemSpec spec = BitPatternSpec(n, 5e3);
    constexpr float kCaps[] = {1e-6f, 1e-3f, 1.0f, 1e6f};
    if (n % 5 == 0) spec.problem.softcap = kCaps[n / 5 % 4];
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, n);
    if (n % 3 == 0) SpreadMagnitudes(&owned, n);
    SpoilBits(&owned, n);
    run(&owned);
    const RowsReport report = CheckAllRows(owned.attention);
    ASSERT_TRUE(report.ok) << report.detail;
    ASSERT_TRUE(std::isfinite(report.bound) && std::isfinite(report.lse_bound));
    ASSERT_TRUE(std::isfinite(report.max_abs_error) && std::isfinite(report.mean_abs_error));
  }
}

TEST(CheckBounds, TheReferencePassesOnArbitraryBits) {
  ExpectAnyBitsPass(static_cast<uint64_t>(3000 * TestScale()), Reference);
}

TEST(CheckBounds, CpuFlashPassesOnArbitraryBits) {
  ExpectAnyBitsPass(static_cast<uint64_t>(6000 * TestScale()), Flash);
}

// In a long sum of equal weights below 1, each addition rounds in the same direction. The bound
// does not allow for that, so cpu_flash has to keep its sums short.
TEST(CheckBounds, CpuFlashSumsEqualWeightsWithinTheBound) {
  constexpr int64_t kRows = 64;  // too many for the decoding path
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, kRows, 64, 1, 1), FreshSeed());
  const Attention& a = owned.attention;
  for (int64_t j = 0; j < 64; ++j) {
    Set(a, owned.K(0, 0, j, 0), j == 0 ? 1 : 0);
    Set(a, owned.V(0, 0, j, 0), j == 1 ? 1 : 0);
  }
  for (int64_t i = 0; i < kRows; ++i) {
    Set(a, owned.Q(0, 0, i, 0), static_cast<float>(i + 1) * 1e-3f);
  }
  Flash(&owned);
  const RowsReport report = CheckAllRows(a);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_LT(report.max_abs_error, 9 * 0x1p-24 / 64);
}

// Checks cpu_flash on two keys of two dimensions in fp32.
RowsReport CheckTwoKeys(float scale, float softcap, const float (&q)[2], const float (&k)[2][2],
                        const float (&v)[2]) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 1, 2, 2, 1);
  spec.problem.scale = scale;
  spec.problem.softcap = softcap;
  OwnedAttention owned = MakeAttention(spec, 1);
  for (int64_t d = 0; d < 2; ++d) {
    Set(owned.attention, owned.Q(0, 0, 0, d), q[d]);
    for (int64_t j = 0; j < 2; ++j) Set(owned.attention, owned.K(0, 0, j, d), k[j][d]);
    Set(owned.attention, owned.V(0, 0, d, 0), v[d]);
  }
  Flash(&owned);
  return CheckAllRows(owned.attention);
}

// -1e40 is negligible beside 1e60, but both overflow fp32: the sum may be Inf of either sign.
TEST(CheckBounds, ASmallTermOfASumMayOverflowToo) {
  for (const float softcap : {0.0f, 1.0f}) {
    for (const float scale : {1.0f, -1.0f, 1e-30f}) {
      for (const bool turned : {false, true}) {
        const float sign = turned ? -1.0f : 1.0f;
        const RowsReport report = CheckTwoKeys(scale, softcap, {1e20f, 1e30f},
                                               {{-1e20f * sign, 1e30f * sign}, {0, 0}}, {1, 5});
        EXPECT_TRUE(report.ok) << scale << " " << softcap << " " << report.detail;
        EXPECT_EQ(report.rows_wide, 1);
      }
    }
  }
}

// Both scores are Inf of either sign before the softcap. The bound must include the second key's
// possible weight, even if it is only 1 beside the first key's e^60.
TEST(CheckBounds, AKeyCountsBesideOneThatMightOutweighIt) {
  const RowsReport report =
      CheckTwoKeys(1e20f, 30, {1e15f, 1e15f}, {{2e15f, -1e15f}, {1e30f, -3e30f}}, {0.5f, -0.75f});
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_EQ(report.rows_wide, 1);
}

// With weights in fp32, the bound is fp32's plus O's own rounding in any dtype: in a row of 65,536
// keys, one lost key and a scale that is off by 0.1 % fail.
TEST(CheckBounds, SmallFaultsInALongRowFailWithWeightsInFp32) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : kDTypes) {
    SCOPED_TRACE(std::string(DTypeName(dtype)) + " ATTEND_TEST_SEED=" + std::to_string(seed));
    for (const bool loses : {true, false}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 1, 65536, 64, 64, dtype);
      spec.problem.return_lse = true;
      if (loses) spec.magnitude_q = 0.05;  // so that all keys count alike
      OwnedAttention owned = MakeAttention(spec, seed);
      Attention& a = owned.attention;
      Flash(&owned);
      const RowsReport right = CheckAllRows(a, false);
      EXPECT_TRUE(right.ok) << right.detail;
      EXPECT_LE(right.bound, CheckAllRows(a).bound);
      const float scale = a.problem.scale;
      const int64_t keys = loses ? 65535 : 65536;
      a.kv_lengths = &keys;
      if (!loses) a.problem.scale *= 1.001f;
      Flash(&owned);
      a.kv_lengths = nullptr;
      a.problem.scale = scale;
      EXPECT_FALSE(CheckAllRows(a, false).ok) << (loses ? "a lost key" : "another scale");
    }
  }
}

// Two roundings of bf16 are 2^-7.
TEST(CheckBounds, OrdinaryBoundsInBf16AreBelowAHundredthOfV) {
  const uint64_t seed = FreshSeed();
  for (const int64_t keys : {1, 2, 3, 5, 9, 20, 100, 1000}) {
    const OwnedAttention owned =
        MakeAttention(MakeSpec(1, 2, 1, 40, keys, 64, 64, DType::kBFloat16), seed);
    const Attention& a = owned.attention;
    CpuReference(a);
    double most = 0;
    for (int64_t n = 0; n < keys * 64; ++n) {
      const int64_t at = n / 64 * a.v.stride_l + n % 64;
      most = std::max(most, std::abs(LoadElementAsDouble(a.v.data, DType::kBFloat16, at)));
    }
    for (const bool rounded : {false, true}) {
      const RowsReport report = CheckAllRows(a, rounded);
      EXPECT_TRUE(report.ok) << report.detail;
      EXPECT_LT(report.bound, 0.01 * most) << keys << " keys, ATTEND_TEST_SEED=" << seed;
    }
  }
}

TEST(CheckBounds, ARowOfAMillionKeysIsCheckedInBoundedMemory) {
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 1 << 20, 1, 1), FreshSeed());
  CpuReference(owned.attention);
  RowsReport report;
  EXPECT_LE(MostAllocated([&] { report = CheckAllRows(owned.attention); }), 4 << 20);
  EXPECT_TRUE(report.ok) << report.detail;
}

TEST(CheckBounds, AMillionRowsAreSampledInBoundedMemory) {
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1 << 20, 1, 1, 1), FreshSeed());
  CpuReference(owned.attention);
  for (const double budget : {1e6, 1e12}) {
    EXPECT_LE(MostAllocated([&] { SampleRows(owned.attention, 1, budget); }), 8 << 20);
  }
}

// Tensor Cores round every sum towards zero. Here each block of 16 products adds 0.9 units in the
// last place to a large first product, which rounding drops.
TEST(CheckBounds, ScoresMayBeTruncatedAsByTensorCores) {
  for (const int64_t dim : {64, 128, 192, 256}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 1, 1, dim, 8, DType::kFloat16);
    spec.problem.scale = 1;
    spec.problem.return_lse = true;
    OwnedAttention owned = MakeAttention(spec, 1);
    const Attention& a = owned.attention;
    const float first = 8200;
    for (int64_t d = 0; d < dim; ++d) {
      const float k = d == 0 ? first : d % 16 == 0 ? 0.9f * 0x1p-10f : 0;
      StoreElement(const_cast<void*>(a.q.data), DType::kFloat16, d, 1);
      StoreElement(const_cast<void*>(a.k.data), DType::kFloat16, d, k);
    }
    CpuReference(a);
    EXPECT_GT(a.lse[0], first);
    a.lse[0] = first;
    const RowsReport report = CheckAllRows(a);
    EXPECT_TRUE(report.ok) << report.detail;
    a.lse[0] = first - static_cast<float>(dim) / 8 * 0x1p-10f;
    EXPECT_FALSE(CheckAllRows(a).ok) << "twice the rounding error";
  }
}

// A plain sum of 40000 equal terms rounds each addition in the same direction.
TEST(CheckBounds, ALongRowDoesNotLoosenTheBoundOfOthers) {
  ProblemSpec spec = MakeSpec(2, 1, 1, 1, 1, 4, 1);
  spec.problem.packed = true;
  spec.q_lengths = {1, 1};
  spec.kv_lengths = {40000, 4};
  spec.magnitude_q = 0;
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 0; j < spec.kv_lengths[static_cast<size_t>(b)]; ++j) {
      Set(owned.attention, owned.V(b, 0, j, 0), 0.7f);
    }
  }
  CpuReference(owned.attention);
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(1, 0, 0, 0), 0.7f * (1 + 100 * 0x1p-24f));
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

// tanh of an infinite score is finite, so the bound stays tight.
TEST(CheckBounds, SoftcapOfAnInfiniteScoreHasATightBound) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 3, 40, 8, 8);
  spec.problem.softcap = 20;
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  Set(owned.attention, owned.K(0, 0, 7, 3), kInfinity);
  CpuReference(owned.attention);
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_GT(report.bound, 0);
  EXPECT_LT(report.bound, 1e-4);
  void* const element = owned.O(0, 0, 1, 4);
  Set(owned.attention, element, Get(owned.attention, element) + 1e-3f);
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

TEST(CheckBounds, LseBeyondFp32IsInfinity) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 2, 3, 1, 1);
  spec.problem.scale = kMost;
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  for (int64_t i = 0; i < 2; ++i) Set(owned.attention, owned.Q(0, 0, i, 0), 2);
  for (int64_t j = 0; j < 3; ++j) Set(owned.attention, owned.K(0, 0, j, 0), 2);
  CpuReference(owned.attention);
  EXPECT_EQ(owned.attention.lse[0], kInfinity);
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_TRUE(std::isfinite(report.lse_bound));
  owned.attention.lse[0] = -kInfinity;
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

// A mean of finite values is finite, even if their sum overflows.
TEST(CheckBounds, MeansOfTheLargestNumbersMustBeFinite) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 2, 4, 2), FreshSeed());
  for (int64_t d = 0; d < 4; ++d) Set(owned.attention, owned.Q(0, 0, 0, d), 0);
  for (int64_t j = 0; j < 2; ++j) {
    Set(owned.attention, owned.V(0, 0, j, 0), 3e38f);
    Set(owned.attention, owned.V(0, 0, j, 1), kMost);  // one rounding from Inf
  }
  CpuReference(owned.attention);
  EXPECT_EQ(Get(owned.attention, owned.O(0, 0, 0, 0)), 3e38f);
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 0, 1), kInfinity);
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 0, 1), -kInfinity);
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 0, 1), kMost);
  Set(owned.attention, owned.O(0, 0, 0, 0), kInfinity);
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

// The products of a masked key overflow in fp32, but its mask exceeds any rounding of its score: it
// must not loosen the bound.
TEST(CheckBounds, AMaskedKeyThatOverflowsDoesNotLoosenTheBound) {
  for (const float mask : {-kMost, -kInfinity}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 1, 90, 2, 4);
    spec.problem.has_bias = true;
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    const Attention& a = owned.attention;
    for (int64_t d = 0; d < 2; ++d) {
      Set(a, owned.Q(0, 0, 0, d), 2);
      Set(a, owned.K(0, 0, 89, d), d == 0 ? 3e38f : -3e38f);
    }
    auto* const bias = const_cast<float*>(static_cast<const float*>(a.bias.data));
    std::fill_n(bias, 90, 0.0f);
    bias[89] = mask;
    CpuReference(a);
    EXPECT_TRUE(CheckAllRows(a).ok);
    const float lse = a.lse[0];
    for (const double off : {1.01, 0.99}) {
      a.lse[0] = lse + static_cast<float>(off - 1);
      EXPECT_FALSE(CheckAllRows(a).ok) << mask;
    }
    a.lse[0] = lse;
    for (int64_t d = 0; d < 4; ++d) {
      const float o = Get(a, owned.O(0, 0, 0, d));
      Set(a, owned.O(0, 0, 0, d), o + 0.01f);
      EXPECT_FALSE(CheckAllRows(a).ok) << mask;
      Set(a, owned.O(0, 0, 0, d), o);
    }
  }
}

// Each operation of a kernel may round a subnormal number by half a step.
TEST(CheckBounds, SubnormalAnswersMayBeOneStepOff) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 1, 4, 1), FreshSeed());
  Set(owned.attention, owned.V(0, 0, 0, 0), 1000 * 0x1p-149f);
  CpuReference(owned.attention);
  for (const int steps : {0, 1, -1, 3, -3}) {
    Set(owned.attention, owned.O(0, 0, 0, 0), static_cast<float>(1000 + steps) * 0x1p-149f);
    EXPECT_EQ(CheckAllRows(owned.attention).ok, std::abs(steps) < 2) << steps;
  }
}

// If every key is masked with the lowest finite number, none is hidden.
TEST(CheckBounds, LseOfAFullyMaskedRowIsNotMinusInfinity) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 1, 30, 8, 4);
  spec.problem.has_bias = true;
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  std::fill_n(const_cast<float*>(static_cast<const float*>(owned.attention.bias.data)), 30, -kMost);
  CpuReference(owned.attention);
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  owned.attention.lse[0] = -kInfinity;
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

}  // namespace
}  // namespace attend::test
