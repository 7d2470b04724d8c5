// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90's general kernels: ALiBi with slopes of any size, softcap beside it, O in
// float32, alone and together.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// Multiply-adds in double that one check may cost.
constexpr double kCheckWork = 1e7;

// At least one of the three, added to the features of AlignedSpec.
ProblemSpec SpecOf(uint64_t seed) {
  std::mt19937_64 random(seed ^ 0x2545f491);
  ProblemSpec spec = AlignedSpec(seed);
  Problem& p = spec.problem;
  p.dim = std::vector{64, 64, 40, 96, 128, 128, 72}[random() % 7];
  p.dim_v = random() % 4 == 0 ? 64 : p.dim;
  p.scale = DefaultScale(p.dim);
  p.has_sinks = random() % 4 == 0;
  const uint64_t terms = 1 + random() % 7;
  p.has_alibi = (terms & 1) != 0;
  p.o_float32 = (terms & 2) != 0;
  p.softcap = (terms & 4) != 0 ? std::vector{0.5f, 5.0f, 30.0f, 1e4f}[random() % 4] : 0.0f;
  spec.alibi_per_sequence = random() % 2 == 0;
  if (random() % 4 == 0) spec.magnitude_q = 20;
  if (random() % 4 == 0) p.mask.alignment = Alignment::kTopLeft;
  if (random() % 4 == 0) p.key_offset = static_cast<int64_t>(random() % 100);
  constexpr Layout kLayouts[] = {Layout::kBHLD, Layout::kBLHD, Layout::kStrided};
  spec.layout = kLayouts[random() % 3];
  spec.misaligned_elements = random() % 4 == 0 ? 4 : 0;
  return random() % 3 == 0 ? InPages(std::move(spec), 64) : spec;
}

TEST(CudaGeneral, RandomProblems) {
  const uint64_t first = FreshSeed();
  const auto count = static_cast<uint64_t>(500 * TestScale());
  uint64_t hopper = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const ProblemSpec spec = SpecOf(seed);
    hopper += CanRun(MakeAttention(spec, seed).attention, KernelId::kCudaFlashSm90);
    for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
      const Status status = RunAndCheck(spec, kernel, cuda::kDefaultConfig, seed, kCheckWork);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
  std::printf("cuda_flash_sm90 took %d of %d\n", static_cast<int>(hopper), static_cast<int>(count));
}

// Enough tiles for the kernel for many tiles, and rows to which ALiBi leaves few keys.
TEST(CudaGeneral, ManyTiles) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const int n : {0, 1, 2}) {
        ProblemSpec spec = MakeSpec(2, 26, 13, 520, 1100, dim, dim, dtype);
        spec.problem.has_alibi = n != 1;
        spec.problem.softcap = n != 0 ? 3.0f : 0.0f;
        spec.problem.o_float32 = n == 2;
        if (n == 1) spec.problem.mask.right = 0;
        const Status status = RunAndCheck(spec, KernelId::kCudaFlashSm90, cuda::kDefaultConfig,
                                          seed + static_cast<uint64_t>(n), kCheckWork);
        ASSERT_TRUE(status.ok()) << status.ToString();
      }
    }
  }
}

// Slopes with which scores leave the range of a tile, or of fp32, or are NaN.
TEST(CudaGeneral, SlopesOfAnySizeAreRight) {
  const uint64_t seed = FreshSeed();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t dim : {64, 128}) {
    for (const float slope : {0.0f, -0.3f, 1e-30f, 3e3f, 1e6f, -1e6f, 1e30f, -1e30f, 3e38f,
                              kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const float softcap : {0.0f, 20.0f}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 200, 333, dim, dim, DType::kBFloat16);
        spec.problem.has_alibi = true;
        spec.problem.softcap = softcap;
        OwnedAttention owned = MakeAttention(spec, seed);
        const_cast<float*>(owned.attention.alibi_slopes)[0] = slope;
        for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
          if (!CanRun(owned.attention, kernel)) continue;
          const Status status = RunOnDevice(&owned, kernel);
          ASSERT_TRUE(status.ok()) << status.ToString();
          const RowsReport report =
              CheckRows(owned.attention, SampleRows(owned.attention, seed, kCheckWork));
          EXPECT_TRUE(report.ok) << report.detail << " slope " << slope << " "
                                 << Label(spec, kernel, -1, seed);
        }
      }
    }
  }
}

// The row's diagonal is at the last key of a tile. Near keys have all of the weight there; ALiBi's
// large terms for far keys of the tile must not make their scores coarser.
TEST(CudaGeneral, SteepSlopesDoNotRoundNearKeys) {
  const uint64_t seed = FreshSeed();
  constexpr float kSlopes[] = {0.3f, 0.7f, 1.3f, 3.3f, 7.7f, 17.9f, 41.3f, 97.1f};
  for (const int64_t dim : {64, 128}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const float softcap : {0.0f, 20.0f}) {
        ProblemSpec spec = MakeSpec(2, 8, 2, 1, 128, dim, dim, dtype);
        spec.problem.has_alibi = true;
        spec.problem.softcap = softcap;
        OwnedAttention owned = MakeAttention(spec, seed);
        std::copy(std::begin(kSlopes), std::end(kSlopes),
                  const_cast<float*>(owned.attention.alibi_slopes));
        for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
          if (!CanRun(owned.attention, kernel)) continue;
          const Status status = RunOnDevice(&owned, kernel);
          ASSERT_TRUE(status.ok()) << status.ToString();
          const RowsReport report =
              CheckRows(owned.attention, SampleRows(owned.attention, seed, kCheckWork));
          EXPECT_TRUE(report.ok) << report.detail << " " << Label(spec, kernel, -1, seed);
        }
      }
    }
  }
}

// Apart from O's rounding, float32 gives the same answer.
TEST(CudaGeneral, FloatAnswersRoundToTheHalfAnswers) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 100, 128}) {
    ProblemSpec spec = MakeSpec(2, 26, 13, 333, 520, dim, dim, DType::kFloat16);
    spec.problem.has_alibi = true;
    OwnedAttention rounded = MakeAttention(spec, seed);
    spec.problem.o_float32 = true;
    OwnedAttention whole = MakeAttention(spec, seed);
    if (!CanRun(whole.attention, KernelId::kCudaFlashSm90)) GTEST_SKIP() << "no Hopper GPU";
    ASSERT_TRUE(RunOnDevice(&rounded, KernelId::kCudaFlashSm90).ok());
    ASSERT_TRUE(RunOnDevice(&whole, KernelId::kCudaFlashSm90).ok());
    for (int64_t h = 0; h < 26; ++h) {
      for (int64_t i = 0; i < 333; ++i) {
        for (int64_t d = 0; d < dim; ++d) {
          const float value = *static_cast<float*>(whole.O(1, h, i, d));
          uint16_t half = 0;
          StoreElement(&half, DType::kFloat16, 0, value);
          ASSERT_EQ(half, *static_cast<uint16_t*>(rounded.O(1, h, i, d)))
              << h << " " << i << " " << d << " "
              << Label(spec, KernelId::kCudaFlashSm90, -1, seed);
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
