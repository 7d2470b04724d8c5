// SPDX-License-Identifier: Apache-2.0
//
// Scores of bf16 as sums of pairs: the machine instruction's arithmetic, and that rows which it
// would not compute accurately are computed without it, with no effect on other rows' bits.

#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/target_kind.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/cpu/pairs_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/cpu/flash_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// False if there are no pairs. Adds the products of 16 pairs to `sums`.
bool AddPairsOf(const uint16_t* a, const uint16_t* b, float* sums) {
  if (!kHavePairs) return false;
  const F32 d;
  const Words dw;
  hn::StoreU(AddPairs(hn::LoadU(d, sums), hn::LoadU(dw, a), hn::LoadU(dw, b)), d, sums);
  return true;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "kernels/cpu/flash.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/problems.h"

namespace attend::cpu_flash {
HWY_EXPORT(AddPairsOf);
bool AddPairsHere(const uint16_t* a, const uint16_t* b, float* sums) {
  return HWY_DYNAMIC_DISPATCH(AddPairsOf)(a, b, sums);
}
}  // namespace attend::cpu_flash

namespace attend::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kLanesMost = 16;

float Widened(uint16_t word) { return std::bit_cast<float>(uint32_t{word} << 16); }

float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// The instruction's model.
float Twin(float sum, const uint16_t* a, const uint16_t* b) {
  sum = Flushed(sum);
  for (const int n : {1, 0}) {
    sum = Flushed(std::fma(Flushed(Widened(a[n])), Flushed(Widened(b[n])), sum));
  }
  return sum;
}

TEST(CpuPairs, TheInstructionRoundsEachProductsSumAndFlushesSubnormals) {
  if (!cpu_flash::HasBf16Pairs()) GTEST_SKIP() << "no bf16 pairs";
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 engine(seed);
  for (int n = 0; n < 100000; ++n) {
    // All bit patterns, or exponents that are near each other.
    const auto word = [&] {
      const auto bits = static_cast<uint16_t>(engine());
      return n % 2 == 0 ? bits : static_cast<uint16_t>((bits & 0x83ff) | 0x3c00);
    };
    uint16_t a[2 * kLanesMost], b[2 * kLanesMost];
    float sums[kLanesMost], before[kLanesMost];
    for (int i = 0; i < 2 * kLanesMost; ++i) a[i] = word(), b[i] = word();
    for (float& sum : sums) sum = Widened(word()) * 1.00001f;
    std::memcpy(before, sums, sizeof(sums));
    if (!cpu_flash::AddPairsHere(a, b, sums)) GTEST_SKIP();
    for (int i = 0; i < kLanesMost; ++i) {
      const float wanted = Twin(before[i], a + 2 * i, b + 2 * i);
      if (std::isnan(wanted)) {
        ASSERT_TRUE(std::isnan(sums[i]));
      } else {
        ASSERT_EQ(sums[i], wanted) << before[i];
      }
    }
  }
}

// Few rows, which are decoded, and many, which are not.
constexpr int64_t kRows[] = {2, 7, 60};
constexpr int64_t kDim = 66;

OwnedAttention Computed(int64_t rows, uint64_t seed,
                        const std::function<void(OwnedAttention*)>& change, float scale = 0.1f) {
  ProblemSpec spec = MakeSpec(1, 2, 1, rows, 700, kDim, 40, DType::kBFloat16);
  spec.problem.scale = scale;
  OwnedAttention owned = MakeAttention(spec, seed);
  change(&owned);
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch);
  return owned;
}

// The row's other elements are 0: scores are these products' alone.
void SetRow(OwnedAttention* owned, int64_t row, float value) {
  for (int64_t d = 0; d < kDim; ++d) {
    Set(owned->attention, owned->Q(0, 1, row, d), d % 3 == 0 ? value : 0);
  }
}

void SetKeys(OwnedAttention* owned, float value) {
  for (int64_t j = 0; j < 700; j += 2) {
    for (int64_t d = 0; d < kDim; ++d) Set(owned->attention, owned->K(0, 0, j, d), value);
  }
}

void ExpectRight(const OwnedAttention& owned) {
  const RowsReport report = CheckAllRows(owned.attention, false);
  EXPECT_TRUE(report.ok) << report.detail;
}

// A row that needs subnormal numbers, fp32's range or IEEE's rules for Inf gets them.
TEST(CpuPairs, RowsUnsuitedToPairsAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  struct Values {
    float query, key;
  };
  // Products of about 1 with a subnormal factor on either side; and Inf times a subnormal, which is
  // Inf.
  for (const Values& values : {Values{0x1p-130f, 0x1p127f}, Values{0x1p127f, 0x1p-130f},
                               Values{0x1p59f, 0x1p-130f}, Values{kInfinity, 0x1p-130f},
                               Values{0x1p-130f, kInfinity}, Values{kNan, 1}, Values{1, kNan}}) {
    SCOPED_TRACE(std::to_string(values.query) + " " + std::to_string(values.key));
    ForEachTarget([&] {
      for (const int64_t rows : kRows) {
        const OwnedAttention owned = Computed(rows, seed, [&](OwnedAttention* one) {
          SetKeys(one, values.key);
          SetRow(one, rows / 2, values.query);
        });
        ExpectRight(owned);
      }
    });
  }
}

TEST(CpuPairs, SubnormalKeysAndLargeScalesAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ForEachTarget([&] {
    for (const int64_t rows : kRows) {
      for (const float scale : {0.1f, 0x1p20f, 0x1p100f}) {
        ExpectRight(Computed(
            rows, seed, [](OwnedAttention* one) { SetKeys(one, 0x1p-128f); }, scale));
      }
    }
  });
}

// On any number of threads, which cut the rows differently.
TEST(CpuPairs, OtherRowsKeepTheirBits) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 8);
  for (const int64_t rows : {2, 7, 60, 400}) {
    const OwnedAttention clean = Computed(rows, seed, [](OwnedAttention*) {});
    for (const int threads : {1, 2, 8}) {
      tbb::task_arena arena(threads);
      arena.execute([&] {
        OwnedAttention dirty =
            Computed(rows, seed, [&](OwnedAttention* one) { SetRow(one, rows / 2, 0x1p-130f); });
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t i = 0; i < rows; ++i) {
            if (h == 1 && i == rows / 2) continue;
            const auto bytes = static_cast<size_t>(40 * sizeof(uint16_t));
            ASSERT_EQ(std::memcmp(dirty.O(0, h, i, 0),
                                  const_cast<OwnedAttention&>(clean).O(0, h, i, 0), bytes),
                      0)
                << h << " " << i << " " << threads;
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace attend::test
#endif  // HWY_ONCE
