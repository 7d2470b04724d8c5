// SPDX-License-Identifier: Apache-2.0
//
// How wide the check's bound is: faults beside masks are seen on every kernel of the host, the
// reference passes whatever it is given, and no number is so odd that the bound is none.

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

TEST_P(CheckBoundsTest, SmallFaultsBesideMasksAreCaughtInTheReference) {
  ExpectPlantedFaultsCaught(GetParam(), Reference);
}

TEST_P(CheckBoundsTest, SmallFaultsBesideMasksAreCaughtInCpuFlash) {
  ExpectPlantedFaultsCaught(GetParam(), Flash);
}

TEST_P(CheckBoundsTest, SmallFaultsInLongRowsAreCaught) {
  ExpectLongRowFaultsCaught(GetParam(), Reference);
  ExpectLongRowFaultsCaught(GetParam(), Flash);
}

TEST_P(CheckBoundsTest, RowsMaskedThroughoutAreWideAndStayInTheRangeOfV) {
  ExpectWideRowsStayInRange(GetParam(), Reference);
  ExpectWideRowsStayInRange(GetParam(), Flash);
}

// Attentions of any bits, answered by `run`, pass.
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

TEST(CheckBounds, TheReferencePassesOnAnyBits) {
  ExpectAnyBitsPass(static_cast<uint64_t>(3000 * TestScale()), Reference);
}

TEST(CheckBounds, CpuFlashPassesOnAnyBits) {
  ExpectAnyBitsPass(static_cast<uint64_t>(6000 * TestScale()), Flash);
}

// The sum of many equal weights below 1 is rounded the same way with each of them, and so must not
// be long: the check's bound does not allow for it.
TEST(CheckBounds, CpuFlashAddsEqualWeightsUpWithinTheBound) {
  constexpr int64_t kRows = 64;  // more than go the way of decoding
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

// Two keys in two dimensions of fp32, answered by cpu_flash.
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

// -1e40 is nothing beside 1e60, yet both are beyond fp32: the sum may be Inf of either sign.
TEST(CheckBounds, ASmallPartOfASumMayOverflowToo) {
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

// Both scores are Inf of either sign before the cap. What the second key may become, 1 beside what
// the first may, e^60, is all that moves O.
TEST(CheckBounds, AKeyCountsBesideOneThatMayOutweighItByFar) {
  const RowsReport report =
      CheckTwoKeys(1e20f, 30, {1e15f, 1e15f}, {{2e15f, -1e15f}, {1e30f, -3e30f}}, {0.5f, -0.75f});
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_EQ(report.rows_wide, 1);
}

// A kernel whose weights stay in fp32 has fp32's bound beside O's own rounding, in any
// dtype: one key of 65,536 that is lost, and a scale that is off by 0.1 %, are seen in flat rows.
TEST(CheckBounds, ExactWeightsShowASmallFaultInALongRow) {
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

// The bounds of ordinary answers say something: two roundings of bf16 are 2^-7.
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

// Which rounds every sum towards zero: one product, and of each 16 others together nine tenths of
// its last place.
TEST(CheckBounds, AScoreMayBeWhatTensorCoresMakeOfIt) {
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
    EXPECT_FALSE(CheckAllRows(a).ok) << "as much again";
  }
}

// The plain implementation adds up 40000 equal terms one by one, each rounded the same way.
TEST(CheckBounds, ARowThatIsHardForThePlainImplementationDoesNotLoosenOthers) {
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

// tanh makes a number of an Inf, and scores are far from where fp32 ends.
TEST(CheckBounds, SoftcapOfInfinityHasABound) {
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

// A mean of finite values is finite, though a sum of them may not be.
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

// A padding key whose products overflow in fp32 makes the row NaN or says nothing of it, if its
// mask is beyond what rounding may make of its score.
TEST(CheckBounds, AHiddenKeyThatOverflowsLoosensNothing) {
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

// Down there every step of a kernel may cost half a step between numbers.
TEST(CheckBounds, SubnormalAnswersMayBeAStepOffAndNoMore) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 1, 4, 1), FreshSeed());
  Set(owned.attention, owned.V(0, 0, 0, 0), 1000 * 0x1p-149f);
  CpuReference(owned.attention);
  for (const int steps : {0, 1, -1, 3, -3}) {
    Set(owned.attention, owned.O(0, 0, 0, 0), static_cast<float>(1000 + steps) * 0x1p-149f);
    EXPECT_EQ(CheckAllRows(owned.attention).ok, std::abs(steps) < 2) << steps;
  }
}

// A mask of the smallest finite number on every key hides none.
TEST(CheckBounds, LseOfARowMaskedThroughoutIsNotMinusInfinity) {
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
