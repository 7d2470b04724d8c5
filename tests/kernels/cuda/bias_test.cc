// SPDX-License-Identifier: Apache-2.0
//
// Biases in the 16 bits of Q on the device: blocks with typical padding, every broadcast, scores
// that fp32's steps cannot represent, and refusals of a launch.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

using testing::HasSubstr;

// Multiply-adds in double that one check may cost.
constexpr double kCheckWork = 1e7;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The lowest finite number, as in typical padding, and others that are far from the scores.
float LowestOf(DType dtype) { return dtype == DType::kBFloat16 ? -3.3895314e38f : -65504.0f; }

ProblemSpec WithBias(ProblemSpec spec, uint64_t seed) {
  std::mt19937_64 random(seed);
  spec.problem.has_bias = true;
  spec.bias_dtype = spec.problem.dtype;
  spec.bias_per_sequence = random() % 2 == 0;
  spec.bias_per_head = random() % 2 == 0;
  spec.bias_per_query = random() % 3 != 0;
  spec.bias_masked_share = std::vector{0.0, 0.3, 1.0}[random() % 3];
  return spec;
}

// AlignedSpec's, mostly of lengths and head dims that Hopper's kernel takes.
ProblemSpec SpecOf(uint64_t seed) {
  std::mt19937_64 random(seed ^ 0x5bd1e995);
  ProblemSpec spec = AlignedSpec(seed);
  if (random() % 8 == 0) return spec;
  spec.problem.dim = std::vector{64, 64, 40, 96, 128, 128, 72}[random() % 7];
  spec.problem.dim_v = spec.problem.dim;
  spec.problem.scale = DefaultScale(spec.problem.dim);
  if (!spec.problem.packed && spec.kv_lengths.empty()) {
    spec.problem.len_k = std::vector{8, 64, 72, 200, 520, 1000}[random() % 6];
  } else if (spec.problem.packed) {
    spec.kv_lengths[0] = 8 * (1 + static_cast<int64_t>(random() % 40));
    for (int64_t& length : spec.kv_lengths) length = std::min(length, spec.kv_lengths[0]);
  } else {
    spec.problem.len_k = 520;
  }
  return spec;
}

void SetElement(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t j, float value) {
  const BiasView& bias = a.bias;
  StoreElement(const_cast<void*>(bias.data), bias.dtype,
               b * bias.stride_b + h * bias.stride_h + i * bias.stride_q + j, value);
}

// Blocks of a random size that are 0, hidden, or far from the scores, or stay as they are. The last
// keys, which are walked first, are hidden more often.
void SetBlocks(const ProblemSpec& spec, const Attention& a, uint64_t seed) {
  std::mt19937_64 random(seed);
  const Problem& p = a.problem;
  const int64_t rows = int64_t{16} << random() % 4;
  const int64_t keys = int64_t{32} << random() % 4;
  const float values[] = {0.0f, 0.0f, -kInfinity, LowestOf(p.dtype), -1e9f, -1e4f, -3e7f, 3e7f};
  const uint64_t kinds = random() % 4 == 0 ? 8 : 7;  // 3e7 lifts rows that see it above all else
  const int64_t padding = random() % 2 == 0 ? p.len_k : p.len_k * 2 / 3;
  const float hidden = random() % 2 == 0 ? -kInfinity : LowestOf(p.dtype);
  for (int64_t b = 0; b < (spec.bias_per_sequence ? p.batch : 1); ++b) {
    for (int64_t h = 0; h < (spec.bias_per_head ? p.heads_q : 1); ++h) {
      const uint64_t salt = random();
      for (int64_t i = 0; i < (spec.bias_per_query ? p.len_q : 1); ++i) {
        for (int64_t j = 0; j < p.len_k; ++j) {
          const uint64_t place = salt ^ static_cast<uint64_t>(i / rows * 131 + j / keys);
          const uint64_t kind = (place * 0x9e3779b97f4a7c15u >> 40) % (kinds + 3);
          if (j >= padding) {
            SetElement(a, b, h, i, j, hidden);
          } else if (kind < kinds) {
            const float value = values[kind];
            SetElement(a, b, h, i, j, p.dtype == DType::kFloat16 ? std::max(value, hidden) : value);
          }
        }
      }
    }
  }
}

void Check(OwnedAttention* owned, const ProblemSpec& spec, KernelId kernel, uint64_t seed) {
  const Status status = RunOnDevice(owned, kernel);
  ASSERT_TRUE(status.ok()) << status.message() << "\n" << Label(spec, kernel, -1, seed);
  const Attention& a = owned->attention;
  const RowsReport report = CheckRows(a, SampleRows(a, seed, kCheckWork));
  EXPECT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, -1, seed);
  EXPECT_TRUE(owned->GuardsIntact()) << Label(spec, kernel, -1, seed);
}

TEST(CudaBias, RandomBiasesAreRight) {
  const uint64_t first = FreshSeed();
  const auto count = static_cast<uint64_t>(500 * TestScale());
  uint64_t hopper = 0;
  for (uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    const ProblemSpec spec = WithBias(SpecOf(seed), seed);
    OwnedAttention owned = MakeAttention(spec, seed);
    if (seed % 4 != 0) SetBlocks(spec, owned.attention, seed);
    for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
      if (!CanRun(owned.attention, kernel)) continue;
      hopper += kernel == KernelId::kCudaFlashSm90;
      ASSERT_NO_FATAL_FAILURE(Check(&owned, spec, kernel, seed));
    }
  }
  std::printf("cuda_flash_sm90 took %d of %d\n", static_cast<int>(hopper), static_cast<int>(count));
}

// Rows that see only keys far below, or far above, still have the mean.
TEST(CudaBias, RowsWithOnlyFarScoresAreRight) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128}) {
    for (const float value : {-3e7f, -1e9f, -3.3895314e38f, 3e7f, 1e38f}) {
      for (const bool by_row : {false, true}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 200, 520, dim, dim, DType::kBFloat16);
        spec.problem.has_bias = true;
        spec.bias_dtype = DType::kBFloat16;
        spec.bias_per_query = by_row;
        OwnedAttention owned = MakeAttention(spec, seed);
        for (int64_t i = 0; i < (by_row ? 200 : 1); ++i) {
          for (int64_t h = 0; h < 2; ++h) {
            for (int64_t j = 0; j < 520; ++j) {
              const bool hides = by_row && j % 3 == i % 3;
              SetElement(owned.attention, 0, h, i, j, hides ? -kInfinity : value);
            }
          }
        }
        for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
          if (!CanRun(owned.attention, kernel)) continue;
          ASSERT_NO_FATAL_FAILURE(Check(&owned, spec, kernel, seed)) << value;
        }
      }
    }
  }
}

// The same bias, given once for all rows and for each row.
TEST(CudaBias, TheBroadcastDoesNotChangeBits) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      ProblemSpec spec = MakeSpec(3, 4, 2, 333, 1000, dim, dim, dtype);
      spec.problem.has_bias = true;
      spec.bias_dtype = dtype;
      spec.bias_masked_share = 0.3;
      spec.bias_per_query = false;
      OwnedAttention row = MakeAttention(spec, seed);
      if (!CanRun(row.attention, KernelId::kCudaFlashSm90)) continue;
      spec.bias_per_query = true;
      OwnedAttention whole = MakeAttention(spec, seed);
      const BiasView& from = row.attention.bias;
      for (int64_t b = 0; b < 3; ++b) {
        for (int64_t h = 0; h < 4; ++h) {
          for (int64_t j = 0; j < 1000; ++j) {
            if (j < 500) SetElement(row.attention, b, h, 0, j, 0.0f);
            const int64_t at = b * from.stride_b + h * from.stride_h + j;
            const float value = LoadElement(from.data, dtype, at);
            for (int64_t i = 0; i < 333; ++i) SetElement(whole.attention, b, h, i, j, value);
          }
        }
      }
      ASSERT_TRUE(RunOnDevice(&row, KernelId::kCudaFlashSm90).ok());
      ASSERT_TRUE(RunOnDevice(&whole, KernelId::kCudaFlashSm90).ok());
      for (int64_t b = 0; b < 3; ++b) {
        EXPECT_TRUE(SameBits(Rows(row, b, 333), Rows(whole, b, 333))) << Describe(spec);
      }
    }
  }
}

// A bias of zeros equals none, bit for bit where tiles hold as many keys without one.
TEST(CudaBias, ZerosChangeNothing) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {104, 128}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const bool by_row : {false, true}) {
        ProblemSpec spec = MakeSpec(2, 4, 2, 333, 1000, dim, dim, dtype);
        if (dim == 104) spec.problem.mask.right = 0;
        OwnedAttention plain = MakeAttention(spec, seed);
        if (!CanRun(plain.attention, KernelId::kCudaFlashSm90)) continue;
        SetBias(dtype, &spec.problem);
        spec.bias_dtype = dtype;
        spec.bias_per_query = by_row;
        OwnedAttention biased = MakeAttention(spec, seed);
        const Problem& p = plain.attention.problem;
        for (int64_t b = 0; b < p.batch; ++b) {
          for (int64_t h = 0; h < p.heads_q; ++h) {
            for (int64_t i = 0; i < p.len_q; ++i) {
              for (int64_t j = 0; j < p.len_k; ++j) SetElement(biased.attention, b, h, i, j, 0.0f);
              for (int64_t d = 0; d < dim; ++d) {
                Set(biased.attention, biased.Q(b, h, i, d),
                    Get(plain.attention, plain.Q(b, h, i, d)));
              }
            }
          }
          for (int64_t h = 0; h < p.heads_kv; ++h) {
            for (int64_t j = 0; j < p.len_k; ++j) {
              for (int64_t d = 0; d < dim; ++d) {
                Set(biased.attention, biased.K(b, h, j, d),
                    Get(plain.attention, plain.K(b, h, j, d)));
                Set(biased.attention, biased.V(b, h, j, d),
                    Get(plain.attention, plain.V(b, h, j, d)));
              }
            }
          }
        }
        ASSERT_TRUE(RunOnDevice(&plain, KernelId::kCudaFlashSm90).ok());
        ASSERT_TRUE(RunOnDevice(&biased, KernelId::kCudaFlashSm90).ok());
        for (int64_t b = 0; b < p.batch; ++b) {
          EXPECT_TRUE(SameBits(Rows(plain, b, p.len_q), Rows(biased, b, p.len_q)))
              << Describe(spec);
        }
      }
    }
  }
}

TEST(CudaBias, ALaunchRefusesUnsupportedBiases) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 64, 128, 64, 64, DType::kBFloat16);
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kBFloat16;
  OwnedAttention owned = MakeAttention(spec, 1);
  if (!CanRun(owned.attention, KernelId::kCudaFlashSm80)) GTEST_SKIP() << "no Tensor Cores";
  for (const DType other : {DType::kFloat16, DType::kBit}) {
    owned.attention.bias.dtype = other;
    EXPECT_THAT(std::string(RunOnDevice(&owned, KernelId::kCudaFlashSm80).message()),
                HasSubstr("bias.dtype"));
  }
  owned.attention.bias.dtype = DType::kBFloat16;
  if (!CanRun(owned.attention, KernelId::kCudaFlashSm90)) GTEST_SKIP() << "no Hopper";
  owned.attention.bias.data = static_cast<const char*>(owned.attention.bias.data) - 2;
  EXPECT_FALSE(CanRun(owned.attention, KernelId::kCudaFlashSm90));
  EXPECT_THAT(std::string(RunOnDevice(&owned, KernelId::kCudaFlashSm90).message()),
              HasSubstr("16 bytes"));
}

}  // namespace
}  // namespace attend::test
