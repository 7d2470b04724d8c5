// SPDX-License-Identifier: Apache-2.0
//
// The GPU's backward pass compared with the reference. O and LSE are the CPU's, so that only the
// gradients are checked.

#include "kernels/cuda/backward/backward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cuda_run.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Kernels are loaded through passes over a problem without rows, keys or heads.
TEST(CudaBackward, EveryKernelLoads) { EXPECT_EQ(cuda::LoadKernels(), cudaSuccess); }

TEST(CudaBackward, RandomProblems) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(300 * TestScale());
  for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
    ProblemSpec spec = RandomSpec(seed + n, 3e5);
    if (spec.problem.page_rows > 0) continue;
    if (n % 5 == 1) spec.problem.key_offset = static_cast<int64_t>(n % 37);
    if (n % 7 == 1) spec.problem.keys_after = static_cast<int64_t>(n % 41);
    if (n % 3 == 1) spec = WithDropout(spec, seed + n);
    ExpectSpecRight(spec, seed + n);
  }
}

// Problems that Tensor Cores support are rare among random problems.
TEST(CudaBackward, RandomAlignedProblems) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(300 * TestScale());
  for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
    ProblemSpec spec = AlignedSpec(seed + n);
    if (spec.problem.dim > 128 || spec.problem.heads_q > 10) continue;  // the check takes long
    if (spec.problem.page_rows > 0) continue;
    constexpr std::pair<int64_t, int64_t> kDims[] = {{40, 64}, {128, 8}, {72, 120}, {12, 16}};
    if (n % 2 == 1) std::tie(spec.problem.dim, spec.problem.dim_v) = kDims[n / 2 % 4];
    ExpectSpecRight(spec, seed + n);
  }
}

// Every tile of the mma.sync kernels, with features as random problems combine them, in shapes of a
// few tiles.
TEST(CudaBackward, EveryHeadDimOfSixteenBitsIsRight) {
  const uint64_t seed = FreshSeed();
  constexpr std::pair<int64_t, int64_t> kDims[] = {{64, 64},   {72, 72},   {80, 136},  {128, 128},
                                                   {136, 136}, {192, 128}, {256, 256}, {24, 200},
                                                   {96, 33},   {160, 100}};
  constexpr DType kBias[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kBit};
  const auto count = static_cast<uint64_t>(80 * TestScale()) + 1;
  for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
    const auto& [dim, dim_v] = kDims[n % 10];
    const auto len_q = static_cast<int64_t>(60 + 37 * n % 111);
    const auto len_k = static_cast<int64_t>(50 + 53 * n % 173);
    ProblemSpec spec = MakeSpec(1, 4, n % 3 == 0 ? 4 : 2, len_q, len_k, dim, dim_v,
                                n / 2 % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
    Problem& p = spec.problem;
    if (n % 2 == 1) p.mask.right = static_cast<int64_t>(n / 10 % 2 * 7);
    if (n % 5 == 2) p.mask.left = 40;
    if (n % 7 == 3) p.mask.alignment = Alignment::kTopLeft;
    if (n % 4 == 3) p.softcap = 3.0f;
    if (n % 6 == 4) p.has_alibi = true;
    if (n % 3 == 1) p.has_sinks = true;
    if (n % 4 == 1) {
      p.has_bias = true;
      spec.bias_dtype = kBias[n / 4 % 4];
      spec.bias_per_head = n % 8 == 1;
      spec.bias_per_query = n % 3 != 0;
    }
    if (n % 11 == 5) p.scale = n % 2 == 0 ? -p.scale : 0.0f;
    if (n % 9 == 4) p.key_offset = 13;
    if (n % 9 == 7) p.keys_after = 21;
    if (n % 5 == 3) spec = WithDropout(spec, seed + n);
    ExpectSpecRight(spec, seed + n);
  }
}

TEST(CudaBackward, HardShapesAreRightInEveryDType) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const auto& [len_q, len_k, dim, dim_v] : {std::tuple{1, 1, 1, 1},
                                                   {1, 300, 1, 1},
                                                   {70, 1, 256, 256},
                                                   {97, 129, 255, 1},
                                                   {35, 1000, 1, 255},
                                                   {193, 65, 7, 9},
                                                   {3, 2500, 16, 16},
                                                   {130, 200, 64, 64},
                                                   {200, 130, 128, 128},
                                                   {100, 130, 192, 128}}) {
      for (const bool causal : {false, true}) {
        ProblemSpec spec = MakeSpec(1, 4, 2, len_q, len_k, dim, dim_v, dtype);
        if (causal) spec.problem.mask.right = 0;
        ExpectSpecRight(spec, seed);
      }
    }
  }
}

// Backward drops the weights that forward drops: with V the unit matrix O is P after dropout, and
// so dV = O^T dO, within fp32's rounding of the sums and of P twice.
TEST(CudaBackward, DropsTheSameWeightsAsTheForwardPass) {
  const uint64_t seed = FreshSeed();
  constexpr int64_t kRows = 150, kKeys = 120;
  ProblemSpec spec = MakeSpec(1, 1, 1, kRows, kKeys, 32, kKeys);
  spec.problem.dropout = 20000;
  spec.problem.key_offset = 5;
  spec.dropout = {.seed = seed, .sequence = 2, .head = 9, .row = 11};
  OwnedAttention owned = MakeAttention(spec, seed);
  const Attention& a = owned.attention;
  for (int64_t n = 0; n < kKeys * kKeys; ++n) {
    Set(a, owned.V(0, 0, n / kKeys, n % kKeys), n / kKeys == n % kKeys ? 1.0f : 0.0f);
  }
  ASSERT_TRUE(RunOnDevice(&owned, KernelId::kCudaFlashFp32).ok());
  OwnedGradients gradients(a, seed + 1);
  const Status status = RunBackward(&owned, &gradients, {KernelId::kCudaFlashFp32});
  ASSERT_TRUE(status.ok()) << status.ToString();
  const Gradients& g = gradients.get();
  for (int64_t n = 0; n < kKeys * kKeys; ++n) {
    const int64_t j = n / kKeys, d = n % kKeys;
    double sum = 0, magnitude = 0;
    for (int64_t i = 0; i < kRows; ++i) {
      const double product = static_cast<double>(Get(a, owned.O(0, 0, i, j))) *
                             LoadElement(g.d_o.data, DType::kFloat32, i * g.d_o.stride_l + d);
      sum += product;
      magnitude += std::abs(product);
    }
    const double d_v = LoadElement(g.d_v.data, DType::kFloat32, j * g.d_v.stride_l + d);
    ASSERT_NEAR(d_v, sum, (kRows + 40) * 0x1p-24 * magnitude) << "key " << j << ", column " << d;
  }
}

// Every tile of the Tensor Cores' kernels, whole and partly used, under every mask, with and
// without softcap and dropout. Lengths end within tiles, and what is beyond them must not count.
TEST(CudaBackward, EveryTileAndMaskIsRight) {
  const uint64_t seed = FreshSeed();
  uint64_t n = 0;
  for (const auto& [dim, dim_v] : {std::pair{64, 64},
                                   {24, 64},
                                   {96, 96},
                                   {72, 40},
                                   {128, 128},
                                   {192, 128},
                                   {136, 72},
                                   {256, 256},
                                   {40, 200},
                                   {200, 16}}) {
    for (const auto& [softcap, dropout] :
         {std::pair{0.0f, 0}, {2.0f, 0}, {0.0f, 20000}, {2.0f, 50000}}) {
      for (const auto& [left, right] : {std::pair{-1, -1}, {-1, 0}, {50, 20}}) {
        ProblemSpec spec = MakeSpec(2, 2, 1, 100, 150, dim, dim_v,
                                    n % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
        spec.problem.softcap = softcap;
        if (dropout > 0) {
          spec.problem.dropout = dropout;
          spec.problem.key_offset = 32;
          spec.dropout = {.seed = seed * n, .sequence = 3, .head = 5, .row = 48};
        }
        spec.problem.mask.left = left;
        spec.problem.mask.right = right;
        if (n % 4 != 0) {
          spec.problem.packed = n % 4 == 1;
          spec.q_lengths = {91, 17};
          spec.kv_lengths = {70, 143};
        }
        ++n;
        const bool taken = dropout == 0 || std::max(dim, dim_v) <= 128;
        ExpectTaken(KernelId::kCudaFlashSm90, spec, seed + n, taken);
        ExpectSpecRight(spec, seed + n);
      }
    }
  }
}

// Keys that a row does not see must not reach its gradients, nor the other way round.
TEST(CudaBackward, NonFiniteValuesReachOnlyTheRowsThatSeeThem) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {16, 256}) {
    for (const float value : {kNan, kInfinity}) {
      for (int where = 0; where < 3; ++where) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 100, 150, dim, dim, DType::kBFloat16);
        spec.problem.mask.right = 0;
        spec.problem.return_lse = true;
        OwnedAttention owned = MakeAttention(spec, seed);
        void* const element = where == 0   ? owned.Q(0, 1, 40, 3)
                              : where == 1 ? owned.K(0, 0, 90, 5)
                                           : owned.V(0, 0, 90, 7);
        Set(owned.attention, element, value);
        SCOPED_TRACE(std::to_string(where) + " is " + std::to_string(value) + ", D " +
                     std::to_string(dim));
        ExpectAllRight(&owned, seed);
        owned.attention.problem.dropout = 32768;
        owned.attention.dropout.seed = seed;
        ExpectAllRight(&owned, seed);
      }
    }
  }
}

// dS leaves fp16's range, although its gradients do not: it is computed again in fp32.
TEST(CudaBackward, LargeOutputGradientsOfFloat16AreRight) {
  const uint64_t seed = FreshSeed();
  ProblemSpec spec = MakeSpec(1, 2, 1, 100, 130, 64, 64, DType::kFloat16);
  spec.problem.return_lse = true;
  spec.problem.scale = 1e-3f;
  OwnedAttention owned = MakeAttention(spec, seed);
  CpuReference(owned.attention);
  for (const Way& way : kWays) {
    OwnedGradients gradients(owned.attention, seed + 1);
    const Gradients& g = gradients.get();
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 100; ++i) {
        const_cast<float*>(g.d_lse)[h * owned.attention.lse_stride_h + i] *= 3e7f;
      }
    }
    if (!Takes(way, owned.attention, g)) continue;
    const Status status = RunBackward(&owned, &gradients, way);
    ASSERT_TRUE(status.ok()) << status.ToString();
    // Where 16 bits can hold it, it stays.
    const DType factors = FactorsOf(way, owned.attention.problem);
    EXPECT_EQ(GradientsJudge(owned.attention, g, factors).Fault(g), "") << NameOf(way);
  }
}

void ExpectSameBits(ProblemSpec spec, int repeats) {
  const uint64_t seed = FreshSeed();
  spec.problem.return_lse = true;
  SCOPED_TRACE(Describe(spec));
  OwnedAttention owned = MakeAttention(spec, seed);
  CpuReference(owned.attention);
  for (const Way& way : kWays) {
    std::vector<std::byte> first;
    // Blocks that take turns meet in memory, in an order kept only by their waiting: a fault may
    // need many runs to appear. Other sums belong to one thread, whose order cannot change.
    const int times =
        way.kernel == KernelId::kCudaFlashSm90 && way.room_for_turns ? repeats : repeats / 20 + 2;
    for (int n = 0; n < times; ++n) {
      OwnedGradients gradients(owned.attention, seed + 1);
      if (!Takes(way, owned.attention, gradients.get())) break;
      const Status status = RunBackward(&owned, &gradients, way);
      ASSERT_TRUE(status.ok()) << status.ToString();
      if (n == 0) first = gradients.Bytes();
      ASSERT_EQ(gradients.Bytes(), first) << NameOf(way) << ", run " << n;
    }
  }
}

// Blocks of one head's keys reach a tile of rows in any order; so do blocks of different heads.
TEST(CudaBackward, RepeatsAreBitwiseEqual) {
  const int repeats = static_cast<int>(1000 * TestScale()) + 2;
  ProblemSpec grouped = MakeSpec(2, 8, 2, 300, 500, 64, 64, DType::kFloat16);
  grouped.problem.mask.right = 0;
  ExpectSameBits(grouped, repeats);
  ExpectSameBits(MakeSpec(1, 3, 3, 200, 1500, 128, 128, DType::kBFloat16), repeats);
  ProblemSpec lengths = MakeSpec(3, 4, 1, 400, 700, 64, 64, DType::kBFloat16);
  lengths.q_lengths = {400, 0, 130};
  lengths.kv_lengths = {1, 700, 333};
  ExpectSameBits(lengths, repeats);
  ProblemSpec window = MakeSpec(2, 2, 2, 600, 600, 128, 128, DType::kFloat16);
  window.problem.mask.left = 150;
  window.problem.mask.right = 40;
  ExpectSameBits(window, repeats);
  ProblemSpec packed = MakeSpec(0, 4, 2, 0, 0, 128, 64, DType::kFloat16);
  packed.problem.packed = true;
  packed.problem.mask.right = 0;
  packed.q_lengths = {129, 0, 300, 64, 0, 1};
  packed.kv_lengths = {0, 70, 300, 257, 0, 130};
  ExpectSameBits(packed, repeats);
  for (const auto& [dim, dim_v] : {std::pair{96, 96}, {192, 128}, {256, 256}}) {
    for (const float softcap : {0.0f, 20.0f}) {
      ProblemSpec spec = MakeSpec(2, 8, 2, 300, 500, dim, dim_v, DType::kFloat16);
      spec.problem.mask.right = 0;
      spec.problem.softcap = softcap;
      if (softcap > 0.0f) spec.problem.dropout = 9000;
      ExpectSameBits(spec, static_cast<int>(50 * TestScale()) + 2);
    }
  }
}

TEST(CudaBackward, UnsupportedPassesAreRefused) {
  cuda::BackwardItem item{};
  item.attention.problem = MakeSpec(1, 1, 1, 4, 4, 8, 8).problem;
  item.kernel = KernelId::kCudaNaive;
  char workspace[256];
  EXPECT_EQ(cuda::LaunchBackward({&item, 1}, workspace, sizeof(workspace), nullptr).code(),
            Code::kUnimplemented);
  item.kernel = KernelId::kCudaFlashFp32;
  const Status small = cuda::LaunchBackward({&item, 1}, workspace, 3, nullptr);
  EXPECT_EQ(small.code(), Code::kInvalidArgument);
  EXPECT_NE(small.message().find("workspace_bytes is 3"), std::string::npos);
  item.attention.problem.len_q = int64_t{1} << 60;
  EXPECT_EQ(cuda::BackwardWorkspaceBytes({&item, 1}).status().code(), Code::kInvalidArgument);
}

TEST(CudaBackward, TilesAreBoundedByTheLargestLaunch) {
  cuda::BackwardItem item{};
  item.attention.problem = MakeSpec(1, 1, 1, 4, 4, 8, 8, DType::kBFloat16).problem;
  const auto taken = [&](KernelId kernel, int64_t batch) {
    item.kernel = kernel;
    item.attention.problem.batch = batch;
    return cuda::BackwardWorkspaceBytes({&item, 1}).ok();
  };
  constexpr int64_t kMost = cuda::kLaunchTilesMax;
  for (const KernelId kernel :
       {KernelId::kCudaFlashFp32, KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
    EXPECT_TRUE(taken(kernel, kMost));
    EXPECT_FALSE(taken(kernel, kMost + 1));
  }
}

}  // namespace
}  // namespace attend::test
