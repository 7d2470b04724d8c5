// SPDX-License-Identifier: Apache-2.0
//
// Properties of the cost model that limits and scheduling rely on. Its agreement with real machines
// is measured (kernels/contract/README.md), not tested.

#include "kernels/contract/cost.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/contract/limits.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using test::MakeSpec;

double CostOf(const test::ProblemSpec& spec, KernelId kernel = KernelId::kCpuFlash) {
  const test::OwnedAttention owned = test::MakeAttention(spec, 1);
  return Cost(owned.attention, kernel);
}

// Without memory: for problems too large for any test.
double CostOf(const Problem& problem, KernelId kernel = KernelId::kCpuFlash) {
  Attention attention;
  attention.problem = problem;
  return Cost(attention, kernel);
}

TEST(Cost, IsNeverBelowTheFlops) {
  const uint64_t seed = test::FreshSeed();
  for (uint64_t n = 0; n < 200; ++n) {
    const test::OwnedAttention owned = test::MakeAttention(test::RandomSpec(seed + n), seed + n);
    for (const KernelInfo& kernel : Kernels()) {
      const double cost = Cost(owned.attention, kernel.id);
      const bool faster = kernel.id == KernelId::kCpuFlashAmx;  // than the unit of cost
      EXPECT_GE(cost, (faster ? 0.2 : 1) * Flops(owned.attention))
          << kernel.name << " seed " << seed + n;
      EXPECT_TRUE(std::isfinite(cost));
    }
  }
}

TEST(Cost, CountsAPairsWorkBesidesItsProducts) {
  const auto per_flop = [](int64_t dim) {
    const test::ProblemSpec spec = MakeSpec(1, 1, 1, 512, 512, dim, dim);
    const test::OwnedAttention owned = test::MakeAttention(spec, 1);
    return Cost(owned.attention, KernelId::kCpuFlash) / Flops(owned.attention);
  };
  EXPECT_GT(per_flop(1), 6);
  EXPECT_LT(per_flop(128), 1.5);
  const test::ProblemSpec plain = MakeSpec(1, 1, 1, 512, 512, 64, 64);
  for (auto set : {+[](Problem& p) { p.softcap = 30; }, +[](Problem& p) { p.has_bias = true; },
                   +[](Problem& p) { p.has_alibi = true; }}) {
    test::ProblemSpec more = plain;
    set(more.problem);
    EXPECT_GT(CostOf(more), 1.05 * CostOf(plain));
  }
  test::ProblemSpec dropped = plain;
  dropped.problem.dropout = 6554;
  for (const KernelInfo& kernel : Kernels()) {
    const bool decodes =
        kernel.id == KernelId::kCudaDecodeSm80 || kernel.id == KernelId::kCudaDecodeSm90;
    if (decodes) continue;  // which have no dropout
    EXPECT_GT(CostOf(dropped, kernel.id), 1.01 * CostOf(plain, kernel.id)) << kernel.name;
  }
  EXPECT_LT(CostOf(dropped), 1.15 * CostOf(plain)) << "vectors of draws are cheap";
}

// tests/bench/KERNELS.md: 16 threads of a Xeon, bf16, H8.
TEST(Cost, OfAmxFollowsTheMeasurements) {
  struct Cell {
    int64_t length, dim, right;
    double forward_ms, backward_ms;
  };
  const Cell cells[] = {{512, 64, -1, 0.257, 1.17},
                        {512, 128, -1, 0.357, 1.47},
                        {2048, 64, -1, 2.76, 11.5},
                        {2048, 128, -1, 4.31, 16.5},
                        {4096, 128, 0, 7.77, 32.8}};
  DeviceInfo device;
  device.units = 16;
  const double per_ms = 1e-3 * CostPerSecond(device);
  for (const Cell& cell : cells) {
    Attention attention;
    attention.problem =
        MakeSpec(1, 8, 8, cell.length, cell.length, cell.dim, cell.dim, DType::kBFloat16).problem;
    attention.problem.mask.right = cell.right;
    const double forward = Cost(attention, KernelId::kCpuFlashAmx) / per_ms / cell.forward_ms;
    const double backward =
        BackwardCost(attention, KernelId::kCpuFlashAmx) / per_ms / cell.backward_ms;
    for (const double ratio : {forward, backward}) {
      EXPECT_GT(ratio, 0.6) << cell.length << " D" << cell.dim;
      EXPECT_LT(ratio, 1.5) << cell.length << " D" << cell.dim;
    }
    RecordProperty("L" + std::to_string(cell.length) + "D" + std::to_string(cell.dim),
                   std::to_string(forward) + " " + std::to_string(backward));
  }
}

TEST(Cost, SlowKernelsCostMore) {
  const test::ProblemSpec spec = MakeSpec(1, 2, 2, 256, 256, 64, 64);
  EXPECT_GT(CostOf(spec, KernelId::kCpuReference), 10 * CostOf(spec, KernelId::kCpuFlash));
  EXPECT_GT(CostOf(spec, KernelId::kCpuFlash), 2 * CostOf(spec, KernelId::kCpuFlashAmx));
  EXPECT_GT(CostOf(spec, KernelId::kCudaFlashSm80), CostOf(spec, KernelId::kCudaFlashSm90));
  EXPECT_GT(CostOf(spec, KernelId::kCudaFlashFp32), 5 * CostOf(spec, KernelId::kCudaFlashSm80));
  EXPECT_GT(CostOf(spec, KernelId::kCudaNaive), 2 * CostOf(spec, KernelId::kCudaFlashFp32));
  test::ProblemSpec causal = spec;
  causal.problem.mask.right = 0;
  EXPECT_EQ(CostOf(causal, KernelId::kCudaNaive), CostOf(spec, KernelId::kCudaNaive))
      << "it computes what the mask hides";
  EXPECT_LT(CostOf(causal), 0.8 * CostOf(spec));
}

// Decoding on a GPU reads K and V once for each 128 rows of a KV head's heads.
TEST(Cost, DecodingManyRowsCostsItsChunks) {
  const auto cost = [](int64_t rows, KernelId kernel) {
    return CostOf(MakeSpec(1, 64, 8, rows, 131072, 128, 128, DType::kBFloat16).problem, kernel);
  };
  const double one = cost(1, KernelId::kCudaDecodeSm90);
  const double chunk = cost(16, KernelId::kCudaDecodeSm90);
  EXPECT_GT(chunk, 1.3 * one);
  EXPECT_LT(chunk, 2 * one);
  for (const int64_t chunks : {2, 3, 4, 32}) {
    const double many = cost(16 * chunks, KernelId::kCudaDecodeSm90);
    EXPECT_GT(many, 0.99 * static_cast<double>(chunks) * chunk) << chunks;
    EXPECT_LT(many, 1.35 * static_cast<double>(chunks) * chunk) << chunks;
  }
  EXPECT_LT(cost(32, KernelId::kCudaDecodeSm90), cost(32, KernelId::kCudaFlashSm90));
  EXPECT_GT(cost(128, KernelId::kCudaDecodeSm90), cost(128, KernelId::kCudaFlashSm90));
}

TEST(Cost, WorkWithoutFlopsHasACost) {
  // One tile for each sequence and head, although there is no key.
  EXPECT_GT(CostOf(MakeSpec(1024, 4, 4, 1, 0, 1, 1)), 4096 * 10e3);
  // All keys are read for one row, although it multiplies little; and as many bytes for a few rows.
  const double row = CostOf(MakeSpec(1, 1, 1, 1, 4096, 64, 64));
  EXPECT_GT(row, 0.02 * CostOf(MakeSpec(1, 1, 1, 192, 4096, 64, 64)));
  EXPECT_LT(CostOf(MakeSpec(1, 4, 1, 1, 4096, 64, 64)), 1.1 * row);
  EXPECT_LT(CostOf(MakeSpec(1, 1, 1, 1, 4096, 64, 64, DType::kBFloat16)), 0.6 * row);
  EXPECT_GT(CostOf(MakeSpec(1, 24, 1, 1, 4096, 64, 64)), 3 * row);
  // Each row of a narrow window computes the tile of keys around it.
  test::ProblemSpec narrow = MakeSpec(1, 1, 1, 2048, 2048, 64, 64);
  narrow.problem.mask.left = narrow.problem.mask.right = 0;
  EXPECT_GT(CostOf(narrow), 2048 * 32 * 2 * 128.0);
}

// Rows whose size is not a multiple of 16 bytes are copied first; the longer they are, the less
// that counts.
TEST(Cost, CopiesHaveACost) {
  const auto ratio = [](int64_t length) {
    const Problem even = MakeSpec(1, 4, 4, length, length, 104, 104, DType::kFloat16).problem;
    Problem odd = even;
    odd.dim = odd.dim_v = 103;
    return CostOf(odd, KernelId::kCudaFlashSm90) / CostOf(even, KernelId::kCudaFlashSm90);
  };
  EXPECT_GT(ratio(1024), 1.2);
  EXPECT_LT(ratio(16384), 1.1);
}

TEST(Cost, FollowsTheTrueLengths) {
  test::ProblemSpec spec = MakeSpec(3, 2, 1, 64, 500, 16, 16);
  const double dense = CostOf(spec);
  spec.kv_lengths = {500, 500, 500};
  EXPECT_EQ(CostOf(spec), dense);
  spec.kv_lengths = {500, 0, 1};
  EXPECT_LT(CostOf(spec), 0.6 * dense);
  test::ProblemSpec packed = MakeSpec(0, 2, 1, 0, 0, 16, 16);
  packed.problem.packed = true;
  packed.q_lengths = {64, 64, 64};
  packed.kv_lengths = {500, 500, 500};
  EXPECT_EQ(CostOf(packed), dense);
}

TEST(Cost, IsFiniteAtTheLimits) {
  Problem largest;
  largest.batch = kBatchMax;
  largest.heads_q = largest.heads_kv = kHeadsMax;
  largest.len_q = largest.len_k = kLengthMax;
  largest.dim = largest.dim_v = kHeadDimMax;
  largest.mask.left = largest.mask.right = INT64_MAX;
  Problem empty = largest;
  empty.batch = 0;
  for (const KernelInfo& kernel : Kernels()) {
    EXPECT_TRUE(std::isfinite(CostOf(largest, kernel.id))) << kernel.name;
    EXPECT_EQ(CostOf(empty, kernel.id), 0) << kernel.name;
  }
}

TEST(Cost, RatesFollowTheDevicesSize) {
  const auto rate = [](DeviceKind kind, int compute_capability, int units) {
    DeviceInfo device;
    device.kind = kind;
    device.compute_capability = compute_capability;
    device.units = units;
    return CostPerSecond(device);
  };
  EXPECT_GT(rate(DeviceKind::kCuda, 90, 132), rate(DeviceKind::kCuda, 80, 108));
  EXPECT_GT(rate(DeviceKind::kCuda, 80, 108), 100 * rate(DeviceKind::kCpu, 0, 2));
  EXPECT_EQ(rate(DeviceKind::kCpu, 0, 4), 2 * rate(DeviceKind::kCpu, 0, 2));
}

}  // namespace
}  // namespace attend
