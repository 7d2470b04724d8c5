// SPDX-License-Identifier: Apache-2.0
//
// Dropout on the GPU: every kernel drops the weights that the contract specifies, at any position
// in a whole, forward and backward, and answers match the reference.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/dropout.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr double kCheckWork = 1e7;

void CheckInAllKernels(const ProblemSpec& spec, uint64_t seed) {
  for (const KernelId kernel : kCudaKernels) {
    const Status status = RunAndCheck(spec, kernel, cuda::kDefaultConfig, seed, kCheckWork);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
}

TEST(CudaDropout, RandomProblems) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(400 * TestScale());
  for (uint64_t n = seed; n < seed + count; ++n) {
    ASSERT_NO_FATAL_FAILURE(CheckInAllKernels(WithDropout(RandomKernelSpec(n), n), n));
  }
}

// Problems for cuda_flash_sm90 are rare among random problems, and so are rows at multiples of 16.
TEST(CudaDropout, RandomAlignedProblems) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(400 * TestScale());
  for (uint64_t n = seed; n < seed + count; ++n) {
    ProblemSpec spec = WithDropout(AlignedSpec(n), n);
    if (n % 4 != 0) spec.dropout.row -= spec.dropout.row % kDropoutTile;
    if (n % 5 == 0) spec.problem.has_sinks = true;
    if (n % 3 == 0) spec.problem.key_offset = static_cast<int64_t>(16 * (n % 7));
    ASSERT_NO_FATAL_FAILURE(CheckInAllKernels(spec, n));
  }
}

// Long enough for many tiles, interior ones and edges.
TEST(CudaDropout, ManyTiles) {
  const uint64_t seed = FreshSeed();
  for (const auto& [dim, dim_v] :
       {std::pair<int64_t, int64_t>{64, 64}, {40, 64}, {96, 128}, {128, 128}, {192, 256}}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const auto& [left, right] : {std::pair<int64_t, int64_t>{-1, -1}, {-1, 0}, {200, 33}}) {
        ProblemSpec spec = MakeSpec(1, 4, 2, 700, 1100, dim, dim_v, dtype);
        spec.problem.mask = {Alignment::kBottomRight, left, right};
        spec.problem.dropout = 6554;
        spec.problem.softcap = right == 0 ? 20.0f : 0.0f;
        spec.dropout = {.seed = seed, .sequence = 3, .head = 5, .row = 64};
        ASSERT_NO_FATAL_FAILURE(CheckInAllKernels(spec, seed));
      }
    }
  }
}

// Whether element d of row i of O is that of a key.
bool IsKept(OwnedAttention* owned, int64_t b, int64_t h, int64_t i, int64_t d) {
  const float o = Get(owned->attention, owned->O(b, h, i, d));
  EXPECT_GE(o, 0.0f);
  return o > 0.0f;
}

// Scores of 0, and V that is the unit matrix on the keys from `first` on: row i of O shows which of
// them it keeps.
void ExpectContractsMask(const ProblemSpec& spec, KernelId kernel, int64_t first) {
  OwnedAttention owned = MakeAttention(spec, 1);
  const Attention& a = owned.attention;
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t n = 0; n < p.len_q * p.dim; ++n) {
        Set(a, owned.Q(b, h, n / p.dim, n % p.dim), 0.0f);
      }
    }
    for (int64_t n = 0; n < p.heads_kv * p.len_k * p.dim_v; ++n) {
      const int64_t j = n / p.dim_v % p.len_k, d = n % p.dim_v;
      Set(a, owned.V(b, n / p.dim_v / p.len_k, j, d), j == first + d ? 1.0f : 0.0f);
    }
  }
  if (!CanRun(a, kernel)) return;
  ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
  const DropoutPlace& at = a.dropout;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.len_q; ++i) {
        for (int64_t d = 0; d < std::min(p.dim_v, p.len_k - first); ++d) {
          const bool keeps = DropoutKeeps(p.dropout, at.seed, at.sequence + b, at.head + h,
                                          at.row + i, p.key_offset + first + d);
          ASSERT_EQ(IsKept(&owned, b, h, i, d), keeps)
              << KernelName(kernel) << ", sequence " << b << ", head " << h << ", row " << i
              << ", key " << first + d << " of " << Describe(spec);
        }
      }
    }
  }
}

TEST(CudaDropout, EveryKernelDropsTheContractsWeights) {
  struct Case {
    int64_t dim, dim_v, row, key_offset;
    int32_t dropout;
  };
  for (const Case& each : {Case{64, 64, 0, 0, 32768},
                           {64, 64, 160, 48, 6554},
                           {32, 64, 8, 16, 32768},
                           {128, 128, 5, 0, 60000},
                           {128, 72, int64_t{1} << 30, int64_t{1} << 20, 1},
                           {256, 200, 13, 0, 32769},
                           {64, 128, 16, 9, 30000}}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      ProblemSpec spec = MakeSpec(2, 4, 2, 210, 300, each.dim, each.dim_v, dtype);
      spec.problem.dropout = each.dropout;
      spec.problem.key_offset = each.key_offset;
      spec.dropout = {.seed = 0xfedcba9876543210u, .sequence = 7, .head = 3, .row = each.row};
      for (const KernelId kernel : kCudaKernels) {
        for (int64_t first = 0; first < 300; first += each.dim_v) {
          ASSERT_NO_FATAL_FAILURE(ExpectContractsMask(spec, kernel, first));
        }
      }
    }
  }
}

TEST(CudaDropout, HoppersKernelRefusesUnalignedRowOffsets) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 8, 8, 64, 64, DType::kFloat16);
  spec.problem.dropout = 1;
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  if (!CanRun(owned.attention, KernelId::kCudaFlashSm90)) GTEST_SKIP() << "no Hopper GPU";
  owned.attention.dropout.row = 8;
  EXPECT_FALSE(CanRun(owned.attention, KernelId::kCudaFlashSm90));
  EXPECT_TRUE(CanRun(owned.attention, KernelId::kCudaFlashSm80));
  const Status status = RunOnDevice(&owned, KernelId::kCudaFlashSm90);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("dropout.row is 8"), std::string::npos) << status.message();
}

TEST(CudaDropout, TensorCoresRefuseUnalignedKeyOffsets) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 8, 8, 64, 64, DType::kFloat16);
  spec.problem.dropout = 1;
  bool any = false;
  for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    if (!CanRun(owned.attention, kernel)) continue;
    any = true;
    owned.attention.problem.key_offset = 40;
    EXPECT_FALSE(CanRun(owned.attention, kernel));
    const Status status = RunOnDevice(&owned, kernel);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("key_offset is 40, must be a multiple of 16 for dropout in " +
                                    std::string(KernelName(kernel))),
              std::string::npos)
        << status.message();
  }
  if (!any) GTEST_SKIP() << "no Tensor Core kernel runs here";
}

// All parts in one launch, each with its own offset.
void CheckParts(const ProblemSpec& spec, KernelId kernel, const std::vector<AttentionSlice>& slices,
                uint64_t seed) {
  OwnedAttention owned = MakeAttention(spec, seed);
  if (!CanRun(owned.attention, kernel)) return;
  DeviceRun run(&owned, kernel);
  ASSERT_TRUE(run.Prepare().ok());
  std::vector<cuda::LaunchItem> items;
  for (const AttentionSlice& slice : slices) {
    const Result<Attention> part = TakeSlice(run.attention(), slice);
    ASSERT_TRUE(part.ok()) << part.status().ToString();
    items.push_back({CanRun(*part, kernel) ? kernel : KernelId::kCudaFlashSm80, *part});
  }
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes(items);
  ASSERT_TRUE(bytes.ok());
  const DeviceMemory workspace(*bytes);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, static_cast<size_t>(*bytes)), cudaSuccess);
  const Status status = cuda::LaunchBatch(items, workspace.get(), *bytes, nullptr);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_TRUE(run.Fetch().ok());
  const RowsReport report =
      CheckRows(owned.attention, SampleRows(owned.attention, seed, kCheckWork));
  EXPECT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, -1, seed);
}

TEST(CudaDropout, PartsDropTheSameWeightsAsTheWhole) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t dim : {64, 128, 192}) {
      ProblemSpec spec = MakeSpec(2, 4, 2, 400, 400, dim, dim, dtype);
      spec.problem.mask.right = 0;
      spec.problem.dropout = 13107;
      spec.dropout = {.seed = seed, .sequence = 1, .head = 2, .row = 32};
      std::vector<AttentionSlice> slices;
      for (int64_t n = 0; n < 4; ++n) {
        for (const auto& [begin, end] :
             {std::pair<int64_t, int64_t>{0, 128}, {128, 144}, {144, 203}, {203, 400}}) {
          slices.push_back({n / 2, n / 2 + 1, n % 2, n % 2 + 1, begin, end});
        }
      }
      for (const KernelId kernel : {KernelId::kCudaNaive, KernelId::kCudaFlashFp32,
                                    KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
        ASSERT_NO_FATAL_FAILURE(CheckParts(spec, kernel, slices, seed));
      }
    }
  }
}

// NaN reaches the rows that keep its key, and no others.
TEST(CudaDropout, ValuesOfDroppedWeightsHaveNoEffect) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t dim : {64, 128, 256}) {
      for (const int64_t right : {-1, 0}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 150, 200, dim, dim, dtype);
        spec.problem.dropout = 32768;
        spec.problem.mask.right = right;
        spec.dropout = {.seed = seed};
        for (const KernelId kernel : kCudaKernels) {
          OwnedAttention owned = MakeAttention(spec, seed);
          if (!CanRun(owned.attention, kernel)) continue;
          Set(owned.attention, owned.V(0, 0, 100, 3), std::numeric_limits<float>::quiet_NaN());
          Set(owned.attention, owned.V(0, 0, 21, 9), std::numeric_limits<float>::infinity());
          ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
          const RowsReport report = CheckAllRows(owned.attention);
          EXPECT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, -1, seed);
        }
      }
    }
  }
}

// Kept values are larger than those of V. Those that then leave the dtype are infinite, as they
// should be, and the others stay finite.
TEST(CudaDropout, TheLargestValuesOverflowOnlyWhereTheyMust) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const int32_t dropout : {1, 32768}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 100, 130, 64, 64, dtype);
      spec.problem.dropout = dropout;
      spec.dropout = {.seed = seed};
      const float most = dtype == DType::kFloat16    ? 65504.0f
                         : dtype == DType::kBFloat16 ? 0x1.fep127f
                                                     : 0x1.fffffep127f;
      for (const KernelId kernel : kCudaKernels) {
        OwnedAttention owned = MakeAttention(spec, seed);
        if (!CanRun(owned.attention, kernel)) continue;
        for (int64_t n = 0; n < 130 * 64; ++n) {
          Set(owned.attention, owned.V(0, 0, n / 64, n % 64), n % 64 % 2 == 0 ? most : -most / 3);
        }
        ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
        const RowsReport report = CheckAllRows(owned.attention);
        EXPECT_TRUE(report.ok) << report.detail << "\n" << Label(spec, kernel, -1, seed);
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
