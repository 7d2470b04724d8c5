// SPDX-License-Identifier: Apache-2.0
//
// The Tensor Core kernels on difficult shapes: a grid of lengths (odd, one, empty, longer on either
// side, several tiles) times head dims, with masks, groups and dtypes drawn for each.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr KernelId kTensorCoreKernels[] = {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90};
constexpr double kCheckWork = 4e6;

void Check(const ProblemSpec& spec, uint64_t seed) {
  for (const KernelId kernel : kTensorCoreKernels) {
    for (const int config : Configs(spec.problem, kernel)) {
      const Status status = RunAndCheck(spec, kernel, config, seed, kCheckWork);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
}

struct Lengths {
  int64_t q, k;
};
constexpr Lengths kGrid[] = {
    {1, 1},       {64, 128},    {128, 192}, {256, 256},   {239, 1},     {799, 3},
    {113, 203},   {113, 128},   {128, 217}, {113, 211},   {108, 256},   {256, 512},
    {384, 256},   {640, 128},   {512, 256}, {1024, 1024}, {1023, 1024}, {1024, 1023},
    {4096, 4096}, {4224, 4224}, {0, 100},   {100, 0},     {1, 9000},    {300, 8200},
};
struct HeadDims {
  int64_t d, v;
};
constexpr HeadDims kHeadDims[] = {{64, 64},   {96, 96}, {128, 128}, {192, 192}, {256, 256},
                                  {192, 128}, {40, 72}, {8, 8},     {104, 200}, {59, 111}};

Mask DrawMask(std::mt19937_64& random) {
  const auto alignment = random() % 2 == 0 ? Alignment::kBottomRight : Alignment::kTopLeft;
  switch (random() % 4) {
    case 0:
      return {};
    case 1:
      return {alignment, -1, 0};
    case 2:
      return {alignment, static_cast<int64_t>(random() % 300), 0};
    default:
      return {alignment, static_cast<int64_t>(random() % 300), static_cast<int64_t>(random() % 99)};
  }
}

ProblemSpec Draw(const Lengths& lengths, const HeadDims& dims, std::mt19937_64& random) {
  constexpr int64_t kGroups[] = {1, 2, 5, 7};
  const bool large = lengths.q * lengths.k > 1 << 22;
  const int64_t heads_kv = large ? 1 : 1 + static_cast<int64_t>(random() % 3);
  const int64_t group = large ? 1 : kGroups[random() % 4];
  ProblemSpec spec =
      MakeSpec(large ? 1 : 2, heads_kv * group, heads_kv, lengths.q, lengths.k, dims.d, dims.v,
               random() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
  Problem& p = spec.problem;
  p.mask = DrawMask(random);
  p.has_sinks = random() % 4 == 0;
  if (random() % 4 == 0) p.softcap = 15.0f;
  if (random() % 3 == 0) {
    for (int64_t b = 0; b < p.batch; ++b) {
      spec.q_lengths.push_back(static_cast<int64_t>(random() % (lengths.q + 1)));
      spec.kv_lengths.push_back(static_cast<int64_t>(random() % (lengths.k + 1)));
    }
    p.packed = random() % 2 == 0;
  }
  const Layout layouts[] = {Layout::kBHLD, Layout::kBLHD, Layout::kStrided};
  spec.layout = layouts[random() % 3];
  return spec;
}

TEST(CudaGrid, EveryLengthWithEveryHeadDimIsRight) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (const Lengths& lengths : kGrid) {
    for (const HeadDims& dims : kHeadDims) {
      // Only a part of them under a sanitizer.
      if (static_cast<double>(random() % 1000) >= 1000 * TestScale()) continue;
      ASSERT_NO_FATAL_FAILURE(Check(Draw(lengths, dims, random), seed));
    }
  }
}

TEST(CudaGrid, LogitsOfTenThousandAreRight) {
  const uint64_t seed = FreshSeed();
  for (const HeadDims& dims : kHeadDims) {
    for (const int64_t right : {-1, 0}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 200, 500, dims.d, dims.v, DType::kFloat16);
      spec.problem.mask.right = right;
      spec.magnitude_q = 1e4;
      ASSERT_NO_FATAL_FAILURE(Check(spec, seed));
    }
  }
}

// Scores near `scale` * `from` at the first key and `scale` * `to` at the last, for every row.
OwnedAttention MakeSlope(const ProblemSpec& spec, uint64_t seed, float from, float to) {
  OwnedAttention owned = MakeAttention(spec, seed);
  const Attention& a = owned.attention;
  const Problem& p = a.problem;
  for (int64_t i = 0; i < p.len_q; ++i) Set(a, owned.Q(0, 0, i, 0), 16.0f);
  for (int64_t j = 0; j < p.len_k; ++j) {
    const float part = static_cast<float>(j) / static_cast<float>(p.len_k - 1);
    Set(a, owned.K(0, 0, j, 0), (from + (to - from) * part) / 16);
  }
  return owned;
}

// The base subtracted in the exponent follows the largest score at any height: far below 0 and
// above it, across it, rising and falling along the keys.
TEST(CudaGrid, ScoresThatRiseAndFallAreRight) {
  const uint64_t seed = FreshSeed();
  const float slopes[][2] = {{-900, -100}, {-100, -900}, {-400, 400}, {400, -400},
                             {-8, 0},      {0, -8},      {100, 900},  {900, 100}};
  struct Case {
    float scale;
    int64_t left;
  };
  for (const HeadDims& dims : kHeadDims) {
    for (const Case& each : {Case{1, -1}, {1, 70}, {-1, -1}, {0, -1}, {1e-38f, -1}}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 70, 500, dims.d, dims.v, DType::kFloat16);
      spec.problem.scale = each.scale;
      spec.problem.mask.left = each.left;
      for (const auto& slope : slopes) {
        for (const KernelId kernel : kTensorCoreKernels) {
          for (const int config : Configs(spec.problem, kernel)) {
            OwnedAttention owned = MakeSlope(spec, seed, slope[0], slope[1]);
            if (!CanRun(owned.attention, kernel)) continue;
            ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
            const RowsReport report = CheckAllRows(owned.attention);
            EXPECT_TRUE(report.ok)
                << report.detail << "\n"
                << Label(spec, kernel, config, seed) << " from " << slope[0] << " to " << slope[1];
          }
        }
      }
    }
  }
}

// A NaN or an infinity among the scores of a row reaches all of the row, as IEEE says.
TEST(CudaGrid, NanAndInfinityOfAScoreReachTheWholeRow) {
  const uint64_t seed = FreshSeed();
  for (const HeadDims& dims : kHeadDims) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      for (const KernelId kernel : kTensorCoreKernels) {
        const ProblemSpec spec = MakeSpec(1, 1, 1, 200, 700, dims.d, dims.v, DType::kFloat16);
        OwnedAttention owned = MakeAttention(spec, seed);
        if (!CanRun(owned.attention, kernel)) continue;
        for (const int64_t row : {3, 77, 199}) Set(owned.attention, owned.Q(0, 0, row, 5), bad);
        Set(owned.attention, owned.K(0, 0, 650, 7), bad);
        ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
        const RowsReport report = CheckAllRows(owned.attention);
        EXPECT_TRUE(report.ok) << report.detail << "\n"
                               << KernelName(kernel) << " " << Describe(spec) << " bad " << bad;
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
