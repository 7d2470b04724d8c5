// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels against double precision: every feature, shape and layout, and what must not
// change a bit.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/check_rows.h"
#include "tests/kernels/cuda_run.h"

namespace attend::test {
namespace {

// Those that keep every hidden key out, bad values and all. cuda_flash_sm90 does so for keys beyond
// a length; a hidden key of its own sequence may spoil the rows of its tile (kernels/README.md).
constexpr KernelId kCarefulKernels[] = {KernelId::kCudaNaive, KernelId::kCudaFlashFp32,
                                        KernelId::kCudaFlashSm80};

std::string Label(const ProblemSpec& spec, KernelId kernel, int config, uint64_t seed) {
  return std::string(KernelName(kernel)) + " config " + std::to_string(config) + " " +
         Describe(spec) + "\nATTEND_TEST_SEED=" + std::to_string(seed);
}

// Multiply-adds in double that one check may cost: all rows of anything small.
constexpr double kCheckWork = 3e7;

// Runs and checks the rows (a sample where there is much to compute) and every guard.
void Check(const ProblemSpec& spec, KernelId kernel, int config, uint64_t seed) {
  OwnedAttention owned = MakeAttention(spec, seed);
  if (!CanRun(owned.attention, kernel)) return;
  const Status status = RunOnDevice(&owned, kernel, config);
  ASSERT_TRUE(status.ok()) << status.ToString() << "\n" << Label(spec, kernel, config, seed);
  const std::vector<RowId> rows = SampleRows(owned.attention, seed, kCheckWork);
  const RowsReport report = CheckRows(owned.attention, rows);
  ASSERT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, config, seed);
  ASSERT_TRUE(owned.GuardsIntact()) << Label(spec, kernel, config, seed);
}

TEST(CudaKernels, RandomSweep) {
  const uint64_t first = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(800 * TestScale()); ++n) {
    const ProblemSpec spec = RandomSpec(first + n);
    for (const KernelId kernel : kCudaKernels) {
      const std::vector<int> configs = Configs(spec.problem, kernel);
      if (configs.empty()) continue;
      ASSERT_NO_FATAL_FAILURE(Check(spec, kernel, configs[n % configs.size()], first + n));
    }
  }
}

TEST(CudaKernels, EveryHeadDim) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {1,  2,  3,  4,  5,   7,   8,   15,  16,  31,  32,  33,  63, 64,
                            65, 80, 95, 96, 100, 127, 128, 129, 160, 192, 224, 255, 256}) {
    for (const int64_t dim_v : {dim, int64_t{257} - dim}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 70, 150, dim, dim_v, dtype);
        spec.problem.mask.right = dim % 2 == 0 ? 0 : -1;
        for (const KernelId kernel : kCudaKernels) {
          for (const int config : Configs(spec.problem, kernel)) {
            ASSERT_NO_FATAL_FAILURE(Check(spec, kernel, config, seed));
          }
        }
      }
    }
  }
}

// Long enough for many tiles, interior ones and edges, with each mask.
TEST(CudaKernels, ManyTiles) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {32, 64, 128, 256}) {
    for (const auto& [left, right] : {std::pair<int64_t, int64_t>{-1, -1},
                                      {-1, 0},
                                      {200, 0},
                                      {100, 333},
                                      {-1, 77},
                                      {500, -1}}) {
      const DType dtype = left == 200 || right == 77 ? DType::kFloat16 : DType::kFloat32;
      ProblemSpec spec = MakeSpec(1, 1, 1, 700, 1100, dim, dim, dtype);
      spec.problem.mask = {dim == 64 ? Alignment::kTopLeft : Alignment::kBottomRight, left, right};
      for (const KernelId kernel : kCudaKernels) {
        for (const int config : Configs(spec.problem, kernel)) {
          ASSERT_NO_FATAL_FAILURE(Check(spec, kernel, config, seed));
        }
      }
    }
  }
}

TEST(CudaKernels, AConfigThatDoesNotExistIsRefused) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    const ProblemSpec spec = MakeSpec(1, 1, 1, 8, 8, 8, 8, dtype);
    for (const KernelId kernel : kCudaKernels) {
      OwnedAttention owned = MakeAttention(spec, FreshSeed());
      if (!CanRun(owned.attention, kernel)) continue;
      EXPECT_FALSE(RunOnDevice(&owned, kernel, 1000).ok());
      EXPECT_FALSE(RunOnDevice(&owned, kernel, -2).ok());
      EXPECT_TRUE(RunOnDevice(&owned, kernel).ok());
    }
  }
}

// Bytes of O and LSE of rows [0, rows) of every head.
std::vector<float> Rows(const OwnedAttention& owned, int64_t b, int64_t rows) {
  const Attention& a = owned.attention;
  std::vector<float> values;
  for (int64_t h = 0; h < a.problem.heads_q; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t q_row = SequenceOf(a, b).q_row + i;
      const int64_t base = b * a.o.stride_b + h * a.o.stride_h + q_row * a.o.stride_l;
      for (int64_t d = 0; d < a.problem.dim_v; ++d) {
        values.push_back(LoadElement(a.o.data, a.problem.dtype, base + d));
      }
      if (a.lse != nullptr) {
        values.push_back(a.lse[b * a.lse_stride_b + h * a.lse_stride_h + q_row]);
      }
    }
  }
  return values;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

enum class Spoil { kNan, kInfinities, kOneInfinity };

// Makes a key's row of K, and but for kOneInfinity its row of V, not finite.
void SpoilKey(OwnedAttention* owned, int64_t key, Spoil spoil) {
  const Attention& a = owned->attention;
  const float inf = std::numeric_limits<float>::infinity();
  if (spoil == Spoil::kOneInfinity) {
    Set(a, owned->K(0, 0, key, 0), inf);
    return;
  }
  const float bad = spoil == Spoil::kNan ? std::numeric_limits<float>::quiet_NaN() : inf;
  for (int64_t d = 0; d < a.problem.dim; ++d) {
    Set(a, owned->K(0, 0, key, d), d % 2 == 0 ? bad : -bad);
    Set(a, owned->V(0, 0, key, d), bad);
  }
}

// A bad key reaches the rows that see it as IEEE says, and not one bit of those that don't.
TEST(CudaKernels, CausalRowsDoNotSeeLaterBadKeys) {
  const uint64_t seed = FreshSeed();
  constexpr int64_t kLength = 300;
  for (const int64_t dim : {32, 64, 100, 128, 256}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, kLength, kLength, dim, dim);
    spec.problem.mask.right = 0;
    for (const KernelId kernel : kCarefulKernels) {
      if (kernel == KernelId::kCudaFlashSm80) spec.problem.dtype = DType::kFloat16;
      OwnedAttention clean = MakeAttention(spec, seed);
      if (!CanRun(clean.attention, kernel)) continue;
      ASSERT_TRUE(RunOnDevice(&clean, kernel).ok());
      for (const int64_t key : {1, 64, 130, 299}) {
        for (const Spoil spoil : {Spoil::kNan, Spoil::kInfinities, Spoil::kOneInfinity}) {
          OwnedAttention dirty = MakeAttention(spec, seed);
          SpoilKey(&dirty, key, spoil);
          ASSERT_TRUE(RunOnDevice(&dirty, kernel).ok());
          const std::string label = " key " + std::to_string(key) + " spoil " +
                                    std::to_string(static_cast<int>(spoil)) + " " +
                                    Label(spec, kernel, -1, seed);
          EXPECT_TRUE(SameBits(Rows(clean, 0, key), Rows(dirty, 0, key))) << label;
          const RowsReport report = CheckAllRows(dirty.attention);
          EXPECT_TRUE(report.ok) << report.detail << label;
          for (int64_t i = key; i < kLength && spoil == Spoil::kNan; ++i) {
            ASSERT_TRUE(std::isnan(Get(dirty.attention, dirty.O(0, 0, i, dim / 2)))) << label;
          }
        }
      }
    }
  }
}

// A bias of -inf keeps the key's value out, NaN or not; also where no mask makes an edge.
TEST(CudaKernels, BiasOfMinusInfinityHidesValues) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128, 200}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 128, 256, dim, dim);
    spec.problem.has_bias = true;
    for (const KernelId kernel : kCarefulKernels) {
      if (kernel == KernelId::kCudaFlashSm80) spec.problem.dtype = DType::kFloat16;
      OwnedAttention owned = MakeAttention(spec, seed);
      if (!CanRun(owned.attention, kernel)) continue;
      const BiasView& bias = owned.attention.bias;
      for (int64_t i = 0; i < 128; ++i) {
        StoreElement(const_cast<void*>(bias.data), bias.dtype, i * bias.stride_q + 77,
                     -std::numeric_limits<float>::infinity());
      }
      Set(owned.attention, owned.V(0, 0, 77, 3), std::numeric_limits<float>::quiet_NaN());
      ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
      const RowsReport report = CheckAllRows(owned.attention);
      EXPECT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, -1, seed);
      const std::vector<float> rows = Rows(owned, 0, 128);
      EXPECT_TRUE(std::none_of(rows.begin(), rows.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

// The same sequences alone, together, elsewhere in memory and at another alignment: same bits.
TEST(CudaKernels, BatchAndPlaceDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    for (const int64_t dim : {64, 80, 128, 192}) {
      ProblemSpec spec = MakeSpec(4, 4, 2, 200, 333, dim, dim, dtype);
      spec.problem.mask.right = 0;
      for (const KernelId kernel : kCarefulKernels) {
        OwnedAttention together = MakeAttention(spec, seed);
        if (!CanRun(together.attention, kernel)) continue;
        ASSERT_TRUE(RunOnDevice(&together, kernel).ok());
        ProblemSpec elsewhere = spec;
        elsewhere.layout = Layout::kStrided;
        elsewhere.misaligned_elements = 3;
        OwnedAttention moved = MakeAttention(elsewhere, seed);
        ASSERT_TRUE(RunOnDevice(&moved, kernel).ok());
        for (int64_t b = 0; b < 4; ++b) {
          EXPECT_TRUE(SameBits(Rows(together, b, 200), Rows(moved, b, 200)))
              << Label(elsewhere, kernel, -1, seed);
          // Alone: the same memory, with a view of one sequence.
          OwnedAttention alone = MakeAttention(spec, seed);
          Attention& a = alone.attention;
          a.problem.batch = 1;
          const auto advance = [&](auto* view) {
            view->data = static_cast<char*>(const_cast<void*>(view->data)) +
                         b * view->stride_b * DTypeBytes(dtype);
          };
          advance(&a.q);
          advance(&a.k);
          advance(&a.v);
          advance(&a.o);
          a.lse += b * a.lse_stride_b;
          ASSERT_TRUE(RunOnDevice(&alone, kernel).ok());
          EXPECT_TRUE(SameBits(Rows(together, b, 200), Rows(alone, 0, 200)))
              << "sequence " << b << " " << Label(spec, kernel, -1, seed);
        }
      }
    }
  }
}

TEST(CudaKernels, AThousandRunsGiveTheSameBits) {
  const uint64_t seed = FreshSeed();
  ProblemSpec causal = MakeSpec(2, 4, 2, 257, 300, 64, 64);
  causal.problem.mask.right = 0;
  ProblemSpec window = MakeSpec(1, 8, 8, 150, 500, 128, 96, DType::kBFloat16);
  window.problem.mask = {Alignment::kBottomRight, 64, 16};
  window.problem.has_bias = true;
  window.problem.has_alibi = true;
  ProblemSpec half = MakeSpec(2, 20, 4, 700, 900, 128, 128, DType::kFloat16);
  half.problem.mask.right = 0;
  for (const ProblemSpec& spec : {causal, window, half}) {
    for (const KernelId kernel : kCudaKernels) {
      OwnedAttention owned = MakeAttention(spec, seed);
      if (!CanRun(owned.attention, kernel)) continue;
      DeviceRun run(&owned, kernel);
      ASSERT_TRUE(run.Run().ok());
      const std::vector<std::byte> first = owned.OutputBytes();
      for (int n = 1; n < 1000; ++n) {
        owned.ResetOutput();
        ASSERT_TRUE(run.Run().ok());
        ASSERT_EQ(first, owned.OutputBytes())
            << "run " << n << " " << Label(spec, kernel, -1, seed);
      }
    }
  }
}

// Sequence 1 of K and O lies more than 2^31 elements after sequence 0.
TEST(CudaKernels, OffsetsBeyondThirtyTwoBits) {
  constexpr int64_t kFar = (int64_t{1} << 31) + 4096;
  const DeviceMemory far_memory(2 * 4 * (kFar + 8192));
  if (far_memory.get() == nullptr) GTEST_SKIP() << "needs 17 GB of device memory";
  const uint64_t seed = FreshSeed();
  for (const KernelId kernel : kCudaKernels) {
    const bool half = kernel == KernelId::kCudaFlashSm80 || kernel == KernelId::kCudaFlashSm90;
    const DType dtype = half ? DType::kFloat16 : DType::kFloat32;
    const int64_t bytes = DTypeBytes(dtype);
    OwnedAttention owned = MakeAttention(MakeSpec(2, 1, 1, 40, 64, 64, 64, dtype), seed);
    if (!CanRun(owned.attention, kernel)) continue;
    DeviceRun run(&owned, kernel);
    ASSERT_TRUE(run.Run().ok());

    Attention a = run.attention();
    char* k = far_memory.get();
    char* o = far_memory.get() + bytes * (kFar + 8192);
    const auto sequence_bytes = [&](int64_t rows) {
      return static_cast<size_t>(rows * 64 * bytes);
    };
    for (int64_t b = 0; b < 2; ++b) {
      const char* from = static_cast<const char*>(a.k.data) + b * a.k.stride_b * bytes;
      ASSERT_EQ(
          cudaMemcpy(k + b * kFar * bytes, from, sequence_bytes(64), cudaMemcpyDeviceToDevice),
          cudaSuccess);
      ASSERT_EQ(cudaMemset(o + b * kFar * bytes, 0xff, sequence_bytes(40)), cudaSuccess);
    }
    a.k.data = k;
    a.k.stride_b = kFar;
    a.o.data = o;
    a.o.stride_b = kFar;
    const cuda::LaunchItem item{kernel, a};
    const Result<int64_t> workspace_bytes = cuda::BatchWorkspaceBytes({&item, 1});
    ASSERT_TRUE(workspace_bytes.ok());
    const DeviceMemory workspace(*workspace_bytes);
    ASSERT_EQ(cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes), cudaSuccess);
    const Status status = cuda::LaunchBatch({&item, 1}, workspace.get(), *workspace_bytes, nullptr);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int64_t b = 0; b < 2; ++b) {
      std::vector<char> got(sequence_bytes(40));
      ASSERT_EQ(cudaMemcpy(got.data(), o + b * kFar * bytes, got.size(), cudaMemcpyDeviceToHost),
                cudaSuccess);
      EXPECT_EQ(std::memcmp(got.data(), owned.O(b, 0, 0, 0), got.size()), 0)
          << KernelName(kernel) << " sequence " << b;
    }
  }
}

TEST(CudaKernels, AHundredThousandKeys) {
  const uint64_t seed = FreshSeed();
  for (const int64_t right : {int64_t{-1}, int64_t{0}}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 131072, 131072, 128, 128);
    spec.problem.mask.right = right;
    OwnedAttention owned = MakeAttention(spec, seed);
    const Status status = RunOnDevice(&owned, KernelId::kCudaFlashFp32);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const std::vector<RowId> rows = SampleRows(owned.attention, seed, 131072.0 * 256 * 24);
    EXPECT_GE(rows.size(), 24u);
    const RowsReport report = CheckRows(owned.attention, rows);
    EXPECT_TRUE(report.ok) << report.detail << "\n"
                           << Label(spec, KernelId::kCudaFlashFp32, -1, seed);
    EXPECT_TRUE(owned.GuardsIntact());
  }
}

}  // namespace
}  // namespace attend::test
