// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels at the ends of fp32's range: random bit patterns in every input, masks of finite
// minima, and scores so large that a float's step is wider than the range of a weight.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/bit_patterns.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kMasks[] = {-1e4f, -1e9f, -1e10f, -2.5e38f, -kMost, 1e10f, 3e38f};

constexpr Leeway kLeeway = {.vanishing_weights = true};

void CheckPatterns(const ProblemSpec& spec, uint64_t seed, size_t turn) {
  for (const KernelId kernel : kCudaKernels) {
    // For the problem as made: packed lengths decide how long the longest sequence is.
    OwnedAttention owned = MakeAttention(spec, seed);
    const std::vector<int> configs = Configs(owned.attention.problem, kernel);
    if (configs.empty() || !CanRun(owned.attention, kernel)) continue;
    const int config = configs[turn % configs.size()];
    SpoilBits(&owned, seed);
    const Status status = RunOnDevice(&owned, kernel, config);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const std::string label = "\n" + Label(spec, kernel, config, seed);
    ASSERT_EQ(JudgeBits(owned, kLeeway).fault, "") << label;
    ASSERT_TRUE(owned.GuardsIntact()) << label;
  }
}

TEST(CudaPatterns, RandomBitsAreRight) {
  const uint64_t first = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(40 * TestScale()); ++n) {
    ASSERT_NO_FATAL_FAILURE(CheckPatterns(BitPatternSpec(first + n, 3e5), first + n, n));
    ASSERT_NO_FATAL_FAILURE(CheckPatterns(AlignedSpec(first + n), first + n, n));
  }
}

// O and LSE of every row must be those of keys that all have the score `score`, except keys with
// negligible weight.
void ExpectMeans(OwnedAttention* owned, int64_t begin, int64_t end, double score,
                 const std::string& label) {
  const Attention& a = owned->attention;
  const double lse = score + std::log(static_cast<double>(end - begin));
  const double step = a.problem.dtype == DType::kFloat32 ? 1e-5 : 1e-2;
  for (int64_t d = 0; d < a.problem.dim_v; ++d) {
    double mean = 0;
    for (int64_t j = begin; j < end; ++j) mean += static_cast<double>(Get(a, owned->V(0, 0, j, d)));
    mean /= static_cast<double>(end - begin);
    for (int64_t i = 0; i < a.problem.len_q; ++i) {
      ASSERT_NEAR(static_cast<double>(Get(a, owned->O(0, 0, i, d))), mean, step) << label;
    }
  }
  for (int64_t i = 0; i < a.problem.len_q; ++i) {
    ASSERT_NEAR(static_cast<double>(a.lse[i]), lse, 1e-5 * std::max(1.0, std::abs(lse))) << label;
  }
}

// Rows whose keys are masked by a bias from the first on, up to all of them: only the others count,
// or all alike.
TEST(CudaPatterns, FiniteMasksHideNothing) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const float mask : kMasks) {
      for (const int64_t pad : {1, 63, 64, 65, 128, 200}) {
        for (const int64_t visible : {0, 70}) {
          ProblemSpec spec = MakeSpec(1, 1, 1, 70, pad + visible, 64, 64, dtype);
          spec.problem.has_bias = true;
          spec.problem.scale = 0;
          spec.bias_per_query = false;
          for (const bool left : {true, false}) {
            for (const KernelId kernel : kCudaKernels) {
              for (const int config : Configs(spec.problem, kernel)) {
                OwnedAttention owned = MakeAttention(spec, seed);
                if (!CanRun(owned.attention, kernel)) continue;
                float* bias =
                    const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
                std::fill_n(bias, pad + visible, 0.0f);
                std::fill_n(bias + (left ? 0 : visible), pad, mask);
                ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
                // Either the masked keys count or the others: those with the larger score.
                const bool masked = visible == 0 || mask > 0;
                const int64_t begin = masked ? (left ? 0 : visible) : (left ? pad : 0);
                ASSERT_NO_FATAL_FAILURE(ExpectMeans(&owned, begin, begin + (masked ? pad : visible),
                                                    masked ? static_cast<double>(mask) : 0.0,
                                                    "mask " + std::to_string(mask) + " left " +
                                                        std::to_string(left) + " " +
                                                        Label(spec, kernel, config, seed)));
              }
            }
          }
        }
      }
    }
  }
}

// Weights are rounded one by one, their sum is not: the mean of the largest values must not leave
// the dtype.
TEST(CudaPatterns, LargestValuesStayFinite) {
  const uint64_t seed = FreshSeed();
  constexpr std::pair<DType, float> kLargest[] = {
      {DType::kFloat16, 65504.0f}, {DType::kBFloat16, 0x1.fep127f}, {DType::kFloat32, kMost}};
  for (const auto& [dtype, largest] : kLargest) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const int64_t keys : {1, 2, 70, 1000}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 70, keys, dim, dim, dtype);
        for (const KernelId kernel : kCudaKernels) {
          for (const int config : Configs(spec.problem, kernel)) {
            OwnedAttention owned = MakeAttention(spec, seed);
            const Attention& a = owned.attention;
            if (!CanRun(a, kernel)) continue;
            for (int64_t j = 0; j < keys; ++j) {
              for (int64_t d = 0; d < dim; ++d) Set(a, owned.V(0, 0, j, d), largest);
            }
            ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
            for (int64_t row = 0; row < 2 * 70; ++row) {
              for (int64_t d = 0; d < dim; ++d) {
                ASSERT_NEAR(Get(a, owned.O(0, row / 70, row % 70, d)) / largest, 1, 0.004)
                    << "row " << row << " " << Label(spec, kernel, config, seed);
              }
            }
          }
        }
      }
    }
  }
}

// Values near the end of the range and of either sign, under scores that rise and masks that hide,
// with and without other terms: partial sums must never leave the range. Beside them a column of
// ordinary values, and one with an Inf that half of the rows do not see.
TEST(CudaPatterns, SumsOfLargeValuesStayFinite) {
  const uint64_t first = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(20 * TestScale()); ++n) {
    const uint64_t seed = first + n;
    std::mt19937_64 random(seed);
    constexpr int64_t kDims[] = {64, 72, 96, 128, 192, 256};
    constexpr int64_t kKeys[] = {3, 70, 300, 700};
    const int64_t dim = kDims[random() % 6], keys = kKeys[random() % 4];
    ProblemSpec spec =
        MakeSpec(1, 2, 2, 70, keys, dim, dim, n % 3 == 0 ? DType::kFloat32 : DType::kBFloat16);
    spec.problem.return_lse = true;
    spec.problem.scale *= n % 2 == 0 ? 1 : 30;
    spec.problem.has_bias = n % 4 == 3;
    if (n % 5 > 1) spec.problem.mask.right = n % 5 == 2 ? 0 : 40;
    for (const KernelId kernel : kCudaKernels) {
      for (const int config : Configs(spec.problem, kernel)) {
        OwnedAttention owned = MakeAttention(spec, seed);
        const Attention& a = owned.attention;
        if (!CanRun(a, kernel)) continue;
        for (int64_t j = 0; j < 2 * keys; ++j) {
          for (int64_t d = 1; d < dim; ++d) {
            const float sign = n % 7 == 0 || (random() & 1) != 0 ? 1.0f : -1.0f;
            const float part = static_cast<float>(random() % 512 + 511) / 1024;
            Set(a, owned.V(0, j / keys, j % keys, d), sign * part * 0x1.fep127f);
          }
        }
        Set(a, owned.V(0, 0, keys / 2, 2), std::numeric_limits<float>::infinity());
        ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
        const Verdict verdict = JudgeBits(owned, kLeeway);
        ASSERT_EQ(verdict.fault, "") << Label(spec, kernel, config, seed);
        ASSERT_GT(verdict.values, 0);
      }
    }
  }
}

// Unseen keys never turn Inf into NaN: a column of V that is Inf throughout, of which every row
// sees a part.
TEST(CudaPatterns, InfinityInValuesStaysInfinity) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 200, 200, dim, dim, dtype);
      spec.problem.mask.right = 0;
      for (const KernelId kernel : kCudaKernels) {
        for (const int config : Configs(spec.problem, kernel)) {
          OwnedAttention owned = MakeAttention(spec, seed);
          const Attention& a = owned.attention;
          if (!CanRun(a, kernel)) continue;
          for (int64_t j = 0; j < 200; ++j) {
            Set(a, owned.V(0, 0, j, 3), std::numeric_limits<float>::infinity());
          }
          ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
          ASSERT_EQ(JudgeBits(owned, kLeeway).fault, "") << Label(spec, kernel, config, seed);
          ASSERT_EQ(Get(a, owned.O(0, 0, 0, 3)), std::numeric_limits<float>::infinity())
              << Label(spec, kernel, config, seed);
        }
      }
    }
  }
}

// O is NaN if a sink is NaN or +Inf, and LSE follows from the sink.
TEST(CudaPatterns, NonFiniteSinksReachTheAnswer) {
  const uint64_t seed = FreshSeed();
  for (const float sink : {std::numeric_limits<float>::quiet_NaN(), -kMost, kMost,
                           std::numeric_limits<float>::infinity()}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 70, 150, 64, 64, dtype);
      spec.problem.has_sinks = true;
      for (const KernelId kernel : kCudaKernels) {
        for (const int config : Configs(spec.problem, kernel)) {
          OwnedAttention owned = MakeAttention(spec, seed);
          if (!CanRun(owned.attention, kernel)) continue;
          *const_cast<float*>(owned.attention.sinks) = sink;
          ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
          ASSERT_EQ(JudgeBits(owned, kLeeway).fault, "")
              << "sink " << sink << " " << Label(spec, kernel, config, seed);
        }
      }
    }
  }
}

// The same without a bias: scores from large elements of Q and K.
TEST(CudaPatterns, LargeScoresAreRight) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const float element : {64.0f, 1024.0f, 32768.0f}) {
        for (const float first_sign : {1.0f, -1.0f}) {
          constexpr int64_t kFirst = 150, kSecond = 90;
          ProblemSpec spec = MakeSpec(1, 1, 1, 70, kFirst + kSecond, dim, dim, dtype);
          for (const KernelId kernel : kCudaKernels) {
            for (const int config : Configs(spec.problem, kernel)) {
              OwnedAttention owned = MakeAttention(spec, seed);
              if (!CanRun(owned.attention, kernel)) continue;
              const Attention& a = owned.attention;
              for (int64_t d = 0; d < dim; ++d) {
                for (int64_t i = 0; i < 70; ++i) Set(a, owned.Q(0, 0, i, d), element);
                for (int64_t j = 0; j < kFirst + kSecond; ++j) {
                  Set(a, owned.K(0, 0, j, d), (j < kFirst ? first_sign : -first_sign) * element);
                }
              }
              ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
              const double score = static_cast<double>(dim) * static_cast<double>(element) *
                                   static_cast<double>(element) *
                                   static_cast<double>(spec.problem.scale);
              ASSERT_NO_FATAL_FAILURE(ExpectMeans(
                  &owned, first_sign > 0 ? 0 : kFirst, first_sign > 0 ? kFirst : kFirst + kSecond,
                  score, std::to_string(element) + " " + Label(spec, kernel, config, seed)));
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
