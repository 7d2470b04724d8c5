// SPDX-License-Identifier: Apache-2.0
//
// Masks of bits on the device: tiles of keys that are hidden or seen completely, every broadcast
// and alignment, and removed keys that have no effect.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// Multiply-adds in double that one check may cost.
constexpr double kCheckWork = 1e7;

constexpr KernelId kKernels[] = {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90,
                                 KernelId::kCudaDecodeSm80, KernelId::kCudaDecodeSm90};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

ProblemSpec WithBits(ProblemSpec spec, uint64_t seed) {
  std::mt19937_64 random(seed);
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kBit;
  spec.bias_per_sequence = random() % 2 == 0;
  spec.bias_per_head = random() % 2 == 0;
  spec.bias_per_query = random() % 4 != 0;
  spec.bias_masked_share = std::vector{0.0, 0.02, 0.5, 0.98}[random() % 4];
  return spec;
}

// The numbers of rows and keys in a mask with broadcast dimensions.
struct MaskShape {
  int64_t batch, heads, rows;
};
MaskShape ShapeOf(const ProblemSpec& spec, const Problem& p) {
  return {spec.bias_per_sequence ? p.batch : 1, spec.bias_per_head ? p.heads_q : 1,
          spec.bias_per_query ? p.len_q : 1};
}

void SetBit(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t j, bool seen) {
  const BiasView& mask = a.bias;
  const int64_t at = b * mask.stride_b + h * mask.stride_h + i * mask.stride_q + j;
  auto& byte = static_cast<uint8_t*>(const_cast<void*>(mask.data))[at / 8];
  const auto bit = static_cast<uint8_t>(1 << at % 8);
  byte = static_cast<uint8_t>(seen ? byte | bit : byte & ~bit);
}

// Blocks of a random size that are all hidden, all seen, or stay as they are.
void SetBlocks(const ProblemSpec& spec, const Attention& a, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t rows = int64_t{16} << random() % 4;
  const int64_t keys = int64_t{32} << random() % 4;
  const MaskShape shape = ShapeOf(spec, a.problem);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const uint64_t salt = random();
      for (int64_t i = 0; i < shape.rows; ++i) {
        for (int64_t j = 0; j < a.problem.len_k; ++j) {
          const uint64_t place = salt ^ static_cast<uint64_t>(i / rows * 131 + j / keys);
          const uint64_t kind = (place * 0x9e3779b97f4a7c15u >> 40) % 3;
          if (kind != 2) SetBit(a, b, h, i, j, kind == 1);
        }
      }
    }
  }
}

// Removes some keys from every row; their K and V become NaN and Inf.
void RemoveSpoiltKeys(const ProblemSpec& spec, OwnedAttention* owned, uint64_t seed) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  std::mt19937_64 random(seed);
  const MaskShape shape = ShapeOf(spec, p);
  for (int64_t j = 0; j < p.len_k; ++j) {
    const uint64_t draw = random();
    if (draw % 8 != 0) continue;
    const float value = std::vector{kNan, kInfinity, -kInfinity}[draw / 8 % 3];
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t i = 0; i < shape.rows; ++i) SetBit(a, b, h, i, j, false);
      }
    }
    for (int64_t b = 0; b < p.batch; ++b) {
      if (j >= SequenceOf(a, b).k_len) continue;
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        const auto place = [&](int64_t dim) { return static_cast<int64_t>(draw >> 32) % dim; };
        Set(a, owned->K(b, h, j, place(p.dim)), value);
        Set(a, owned->V(b, h, j, place(p.dim_v)), value);
      }
    }
  }
}

void Check(OwnedAttention* owned, const ProblemSpec& spec, KernelId kernel, uint64_t seed) {
  ASSERT_TRUE(RunOnDevice(owned, kernel).ok()) << Label(spec, kernel, -1, seed);
  const Attention& a = owned->attention;
  const RowsReport report = CheckRows(a, SampleRows(a, seed, kCheckWork));
  EXPECT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, -1, seed);
  EXPECT_TRUE(owned->GuardsIntact()) << Label(spec, kernel, -1, seed);
}

TEST(CudaMaskBits, RandomMasksAreRight) {
  const uint64_t first = FreshSeed();
  const auto count = static_cast<uint64_t>(500 * TestScale());
  uint64_t hopper = 0, decoding = 0;
  for (uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    const ProblemSpec spec =
        WithBits(seed % 4 == 0 ? RandomKernelSpec(seed, 3e6) : AlignedSpec(seed), seed);
    OwnedAttention owned = MakeAttention(spec, seed);
    if (seed % 3 != 0) SetBlocks(spec, owned.attention, seed);
    if (seed % 2 == 0) RemoveSpoiltKeys(spec, &owned, seed);
    for (const KernelId kernel : kKernels) {
      if (!CanRun(owned.attention, kernel)) continue;
      hopper += kernel == KernelId::kCudaFlashSm90;
      decoding += kernel == KernelId::kCudaDecodeSm80;
      ASSERT_NO_FATAL_FAILURE(Check(&owned, spec, kernel, seed));
    }
  }
  std::printf("of %d cuda_flash_sm90 took %d, cuda_decode_sm80 %d\n", static_cast<int>(count),
              static_cast<int>(hopper), static_cast<int>(decoding));
  // An H200 took some 240 and 390 of 500.
  if (count < 50) return;
  const ProblemSpec small = MakeSpec(1, 1, 1, 1, 64, 64, 64, DType::kFloat16);
  const OwnedAttention any = MakeAttention(small, first);
  EXPECT_EQ(hopper > 0, CanRun(any.attention, KernelId::kCudaFlashSm90));
  EXPECT_EQ(decoding > 0, CanRun(any.attention, KernelId::kCudaDecodeSm80));
}

// More tiles of keys than are looked at together, with rows that see one key each.
TEST(CudaMaskBits, FewSeenKeysAmongManyAreRight) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128}) {
    for (const int64_t keys : {5000, 5120, 5013}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 200, keys, dim, dim, DType::kBFloat16);
      spec.problem.has_bias = spec.problem.return_lse = true;
      spec.bias_dtype = DType::kBit;
      spec.bias_masked_share = 1.0;
      OwnedAttention owned = MakeAttention(spec, seed);
      std::mt19937_64 random(seed);
      for (int64_t i = 0; i < 200; i += 3) {
        SetBit(owned.attention, 0, 0, i, static_cast<int64_t>(random() % keys), true);
      }
      for (const KernelId kernel : kKernels) {
        if (!CanRun(owned.attention, kernel)) continue;
        ASSERT_NO_FATAL_FAILURE(Check(&owned, spec, kernel, seed));
      }
    }
  }
}

// A mask that fills an allocation of its own, whose end compute-sanitizer then knows.
void CheckMaskAlone(KernelId kernel, int64_t rows, int64_t keys, int64_t dim, bool by_row) {
  const uint64_t seed = FreshSeed();
  ProblemSpec spec = MakeSpec(1, 1, 1, rows, keys, dim, dim, DType::kBFloat16);
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kBit;
  spec.bias_masked_share = 0.5;
  spec.bias_per_query = by_row;
  OwnedAttention owned = MakeAttention(spec, seed);
  if (!CanRun(owned.attention, kernel)) return;
  ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
  const std::vector<float> expected = Rows(owned, 0, rows);
  owned.ResetOutput();
  DeviceRun run(&owned, kernel);
  ASSERT_TRUE(run.Prepare().ok());
  const int64_t bytes = (keys + 7) / 8 * (by_row ? rows : 1);
  const DeviceMemory mask(bytes);
  ASSERT_EQ(cudaMemcpy(mask.get(), run.attention().bias.data, static_cast<size_t>(bytes),
                       cudaMemcpyDeviceToDevice),
            cudaSuccess);
  cuda::LaunchItem item{kernel, run.attention()};
  item.attention.bias.data = mask.get();
  const Result<int64_t> needed = cuda::BatchWorkspaceBytes({&item, 1});
  ASSERT_TRUE(needed.ok());
  const DeviceMemory workspace(*needed);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, static_cast<size_t>(*needed)), cudaSuccess);
  ASSERT_TRUE(cuda::LaunchBatch({&item, 1}, workspace.get(), *needed, nullptr).ok());
  ASSERT_TRUE(run.Fetch().ok());
  EXPECT_TRUE(SameBits(expected, Rows(owned, 0, rows))) << Describe(spec);
}
TEST(CudaMaskBits, TheMaskIsNotReadBeyondItsMemory) {
  for (const int64_t dim : {64, 128}) {
    for (const int64_t keys : {125, 1000, 1013, 1016, 4090}) {
      for (const bool by_row : {false, true}) {
        CheckMaskAlone(KernelId::kCudaFlashSm90, 130, keys, dim, by_row);
        for (const int64_t rows : {8, 130}) {
          CheckMaskAlone(KernelId::kCudaDecodeSm80, rows, keys, dim, by_row);
          CheckMaskAlone(KernelId::kCudaDecodeSm90, rows, keys, dim, by_row);
        }
      }
    }
  }
}

// The same mask, given once for all rows and for each row.
TEST(CudaMaskBits, TheBroadcastDoesNotChangeBits) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128}) {
    ProblemSpec spec = MakeSpec(3, 4, 2, 333, 1000, dim, dim, DType::kFloat16);
    spec.problem.has_bias = true;
    spec.bias_dtype = DType::kBit;
    spec.bias_masked_share = 0.3;
    spec.bias_per_query = false;
    OwnedAttention row = MakeAttention(spec, seed);
    if (!CanRun(row.attention, KernelId::kCudaFlashSm90)) continue;
    ASSERT_TRUE(RunOnDevice(&row, KernelId::kCudaFlashSm90).ok());
    spec.bias_per_query = true;
    OwnedAttention whole = MakeAttention(spec, seed);
    const BiasView& from = row.attention.bias;
    const BiasView& to = whole.attention.bias;
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < 333; ++i) {
          std::memcpy(
              static_cast<char*>(const_cast<void*>(to.data)) +
                  (b * to.stride_b + h * to.stride_h + i * to.stride_q) / 8,
              static_cast<const char*>(from.data) + (b * from.stride_b + h * from.stride_h) / 8,
              125);
        }
      }
    }
    ASSERT_TRUE(RunOnDevice(&whole, KernelId::kCudaFlashSm90).ok());
    for (int64_t b = 0; b < 3; ++b) {
      EXPECT_TRUE(SameBits(Rows(row, b, 333), Rows(whole, b, 333))) << Describe(spec);
    }
  }
}

}  // namespace
}  // namespace attend::test
