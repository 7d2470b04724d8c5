// SPDX-License-Identifier: Apache-2.0
//
// The decoding kernels, and every kernel over K and V in pages, compared with double precision and
// with themselves: alone, in a batch, in a list, dense, in pages, in a graph.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/cuda/decode/decode_kernels.h"

namespace attend::test {
namespace {

// For the attention made from the spec: if packed, its longest sequence may be shorter than the
// spec's, and use other variants.
std::vector<int> ConfigsOf(const ProblemSpec& spec, KernelId kernel, uint64_t seed) {
  return Configs(MakeAttention(spec, seed).attention.problem, kernel);
}

// Lengths at the edges of tiles, pages and splits.
const std::vector<int64_t>& Lengths() {
  static const std::vector<int64_t> lengths = {0,    1,    15,   16,   17,   63,   64,   65,  127,
                                               128,  129,  255,  256,  257,  511,  512,  513, 1000,
                                               1024, 2047, 2048, 2049, 2304, 4095, 4097, 6000};
  return lengths;
}

// A problem that decoding kernels take.
ProblemSpec DecodeSpec(std::mt19937_64* random, int64_t len_q, int64_t group) {
  const int64_t batch = Pick(random, {1, 1, 2, 5});
  const int64_t heads_kv = Pick(random, {1, 2, 3});
  const int64_t dim = Pick(random, {64, 128, 128, 256, 72, 192, 8});
  const int64_t dim_v = Pick(random, {dim, dim, 64, 128});
  ProblemSpec spec =
      MakeSpec(batch, heads_kv * group, heads_kv, len_q, Pick(random, Lengths()), dim, dim_v,
               (*random)() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
  Problem& p = spec.problem;
  spec.layout = (*random)() % 2 == 0 ? Layout::kBHLD : Layout::kBLHD;
  if ((*random)() % 2 == 0) p.mask.right = 0;
  if ((*random)() % 3 == 0) p.mask.left = Pick(random, {0, 5, 100, 700, 3000});
  if ((*random)() % 4 == 0) p.softcap = 20.0f;
  p.has_sinks = (*random)() % 4 == 0;
  p.has_alibi = (*random)() % 4 == 0;
  if ((*random)() % 5 == 0) p.scale = -p.scale;
  if ((*random)() % 5 == 0) spec.magnitude_q = 300;
  if ((*random)() % 2 == 0) {
    for (int64_t b = 0; b < batch; ++b) {
      spec.kv_lengths.push_back(std::min(Pick(random, Lengths()), p.len_k));
      spec.q_lengths.push_back(static_cast<int64_t>((*random)() % (len_q + 1)));
    }
    p.packed = (*random)() % 4 == 0;
  }
  return spec;
}

class CudaDecode : public DecodeKernelTest {};
INSTANTIATE_TEST_SUITE_P(Kernels, CudaDecode, DecodeKernels(), NameOfKernel);

TEST_P(CudaDecode, EveryRowCountAndGroupIsRight) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  const double share = TestScale();
  for (const int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64}) {
    for (int64_t len_q = 1; len_q <= 17 && len_q * group <= 128; ++len_q) {
      if (share < 1 && len_q > 5) continue;
      ProblemSpec spec = DecodeSpec(&random, len_q, group);
      if (random() % 2 == 0) spec = InPages(spec, Pick(&random, {16, 32, 64, 256, 1024}));
      for (const int config : ConfigsOf(spec, kernel_, seed + static_cast<uint64_t>(len_q))) {
        const Status status = RunAndCheck(spec, kernel_, config, seed + len_q, kCheckWork);
        ASSERT_TRUE(status.ok()) << status.ToString();
      }
    }
  }
}

TEST_P(CudaDecode, LongSequencesAreRight) {
  const uint64_t seed = FreshSeed();
  for (const int64_t len : {8191, 8193, 40000, 140000}) {
    for (const int64_t len_q : {1, 5, 16}) {
      ProblemSpec spec = MakeSpec(1, 8, 1, len_q, len, 128, 128, DType::kBFloat16);
      spec.problem.mask.right = 0;
      const Status status = RunAndCheck(InPages(spec, 64), kernel_, -1, seed, 1e8);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
}

// Every kernel that supports them.
TEST(CudaPages, RandomProblemsAreRight) {
  const uint64_t first = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(400 * TestScale()); ++n) {
    const ProblemSpec spec = RandomKernelSpec(first + n);
    for (const KernelId kernel : kCudaKernels) {
      const std::vector<int> configs = ConfigsOf(spec, kernel, first + n);
      if (configs.empty()) continue;
      const Status status = RunAndCheck(spec, kernel, configs[n % configs.size()], first + n, 1e8);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
}

TEST(CudaPages, PagesDoNotChangeBits) {
  const uint64_t first = FreshSeed();
  std::mt19937_64 random(first);
  for (uint64_t n = 0; n < static_cast<uint64_t>(150 * TestScale()); ++n) {
    const ProblemSpec spec = n % 2 == 0 ? RandomSpec(first + n)
                                        : DecodeSpec(&random, 1 + static_cast<int64_t>(n % 9),
                                                     Pick(&random, {1, 4, 7, 8}));
    const ProblemSpec paged = InPages(spec, int64_t{16} << (n % 7));
    for (const KernelId kernel : kCudaKernels) {
      OwnedAttention dense = MakeAttention(spec, first + n);
      OwnedAttention in_pages = MakeAttention(paged, first + n);
      if (!CanRun(in_pages.attention, kernel) || !CanRun(dense.attention, kernel)) continue;
      ASSERT_TRUE(RunOnDevice(&dense, kernel).ok());
      ASSERT_TRUE(RunOnDevice(&in_pages, kernel).ok());
      EXPECT_EQ(dense.OutputBytes(), in_pages.OutputBytes()) << Label(paged, kernel, -1, first + n);
    }
  }
}

// One element of a key's row is not finite, in its first or last column; a tile has columns beyond
// D next to the latter. Where -Inf meets a positive number, the row lacks that key.
void CheckColumns(const ProblemSpec& spec, KernelId kernel, uint64_t seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr int64_t kKey = 7;
  const Problem& p = spec.problem;
  for (const int64_t column : {int64_t{0}, p.dim - 1}) {
    for (const float bad : {-kInf, kInf, std::numeric_limits<float>::quiet_NaN()}) {
      OwnedAttention owned = MakeAttention(spec, seed);
      const Attention& a = owned.attention;
      if (!CanRun(a, kernel)) return;
      Set(a, owned.K(0, 0, kKey, column), bad);
      for (int64_t row = 0; row < p.heads_q * p.len_q; ++row) {
        Set(a, owned.Q(0, row / p.len_q, row % p.len_q, column), 0.5f);
      }
      ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
      const std::string label = "column " + std::to_string(column) + " is " + std::to_string(bad) +
                                "\n" + Label(spec, kernel, -1, seed);
      const RowsReport report = CheckAllRows(a);
      EXPECT_TRUE(report.ok) << report.detail << " " << label;
      const bool finite = std::isfinite(Get(a, owned.O(0, 0, p.len_q - 1, 0)));
      EXPECT_EQ(finite, bad == -kInf) << label;
    }
  }
}

TEST(CudaPages, ColumnsBeyondDAreNotReadAsKeys) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {8, 72, 96, 97, 120, 192, 200}) {
    for (const int64_t len_q : {1, 3}) {
      for (const KernelId kernel : kCudaKernels) {
        const DType dtype = kernel == KernelId::kCudaFlashFp32 ? DType::kFloat32
                            : dim % 16 == 0                    ? DType::kBFloat16
                                                               : DType::kFloat16;
        const ProblemSpec spec = MakeSpec(1, 8, 1, len_q, 200, dim, dim, dtype);
        ASSERT_NO_FATAL_FAILURE(CheckColumns(spec, kernel, seed));
        ASSERT_NO_FATAL_FAILURE(CheckColumns(InPages(spec, 16), kernel, seed));
      }
    }
  }
}

// Two sequences over the same pages, in descending order.
TEST(CudaPages, SequencesMaySharePages) {
  const uint64_t seed = FreshSeed();
  for (const KernelId kernel : kCudaKernels) {
    const DType dtype = kernel == KernelId::kCudaFlashFp32 ? DType::kFloat32 : DType::kBFloat16;
    const ProblemSpec spec = InPages(MakeSpec(2, 8, 2, 3, 700, 128, 128, dtype), 16);
    OwnedAttention owned = MakeAttention(spec, seed);
    Attention& a = owned.attention;
    auto* const table = const_cast<int32_t*>(a.kv_pages.pages);
    std::sort(table, table + a.kv_pages.stride, std::greater<>());
    std::copy_n(table, a.kv_pages.stride, table + a.kv_pages.stride);
    if (!CanRun(a, kernel)) continue;
    ASSERT_TRUE(RunOnDevice(&owned, kernel).ok());
    const RowsReport report = CheckAllRows(a);
    EXPECT_TRUE(report.ok) << KernelName(kernel) << " " << report.detail;
  }
}

// Sequences of any lengths together and each alone, as a list and as a batch.
TEST_P(CudaDecode, NeighboursDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (int n = 0; n < static_cast<int>(40 * TestScale()) + 1; ++n) {
    std::vector<OwnedAttention> owned;
    std::vector<std::vector<std::byte>> alone;
    std::vector<std::unique_ptr<DeviceRun>> runs;
    std::vector<cuda::LaunchItem> items;
    for (size_t i = 0; i < 1 + random() % 9; ++i) {
      ProblemSpec spec =
          DecodeSpec(&random, 1 + static_cast<int64_t>(random() % 8), Pick(&random, {1, 2, 7, 8}));
      if (random() % 2 == 0) spec = InPages(spec, Pick(&random, {16, 128}));
      OwnedAttention one = MakeAttention(spec, seed + i);
      if (!CanRun(one.attention, kernel_)) continue;
      ASSERT_TRUE(RunOnDevice(&one, kernel_).ok());
      alone.push_back(one.OutputBytes());
      owned.push_back(std::move(one));
    }
    for (OwnedAttention& each : owned) {
      each.ResetOutput();
      runs.push_back(std::make_unique<DeviceRun>(&each, kernel_));
      ASSERT_TRUE(runs.back()->Prepare().ok());
      items.push_back({kernel_, runs.back()->attention()});
    }
    if (items.empty()) continue;
    const Result<int64_t> bytes = cuda::BatchWorkspaceBytes(items);
    ASSERT_TRUE(bytes.ok());
    const DeviceMemory workspace(*bytes);
    ASSERT_EQ(cudaMemset(workspace.get(), 0xff, *bytes), cudaSuccess);
    ASSERT_EQ(cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes), cudaSuccess);
    const Status status = cuda::LaunchBatch(items, workspace.get(), *bytes, nullptr);
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (size_t i = 0; i < owned.size(); ++i) {
      ASSERT_TRUE(runs[i]->Fetch().ok());
      EXPECT_EQ(owned[i].OutputBytes(), alone[i])
          << i << " of " << owned.size() << " " << Describe(owned[i].attention.problem)
          << "\nATTEND_TEST_SEED=" << seed;
    }
    std::vector<char> head(cuda::kTileQueueBytes, 1);
    ASSERT_EQ(cudaMemcpy(head.data(), workspace.get(), head.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(head, std::vector<char>(head.size(), 0)) << "launches leave the counters at zero";
  }
}

TEST_P(CudaDecode, ABatchsSequencesAreAsAlone) {
  const uint64_t seed = FreshSeed();
  for (const int64_t len_q : {1, 4}) {
    ProblemSpec spec = MakeSpec(6, 16, 2, len_q, 9000, 128, 128, DType::kBFloat16);
    spec.problem.mask.right = 0;
    spec.kv_lengths = {9000, 1, 130, 8192, 2049, 600};
    spec = InPages(spec, 32);
    OwnedAttention together = MakeAttention(spec, seed);
    ASSERT_TRUE(RunOnDevice(&together, kernel_).ok());
    for (int64_t b = 0; b < 6; ++b) {
      OwnedAttention alone = MakeAttention(spec, seed);
      Attention& a = alone.attention;
      a.problem.batch = 1;
      a.problem.len_k = spec.kv_lengths[static_cast<size_t>(b)];
      a.kv_lengths = nullptr;
      a.q.data = static_cast<const char*>(a.q.data) + 2 * b * a.q.stride_b;
      a.o.data = static_cast<char*>(a.o.data) + 2 * b * a.o.stride_b;
      a.lse += b * a.lse_stride_b;
      a.kv_pages.pages += b * a.kv_pages.stride;
      ASSERT_TRUE(RunOnDevice(&alone, kernel_).ok());
      EXPECT_TRUE(SameBits(Rows(together, b, len_q), Rows(alone, 0, len_q))) << b;
    }
  }
}

// A captured step runs again after a sequence has grown.
TEST_P(CudaDecode, GraphsFollowTheLengths) {
  const uint64_t seed = FreshSeed();
  ProblemSpec spec = MakeSpec(2, 8, 1, 1, 5000, 128, 128, DType::kFloat16);
  spec.kv_lengths = {4000, 5000};
  spec = InPages(spec, 64);
  OwnedAttention owned = MakeAttention(spec, seed);
  DeviceRun run(&owned, kernel_);
  ASSERT_TRUE(run.Run().ok());
  const cuda::LaunchItem item{kernel_, run.attention()};
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes({&item, 1});
  const DeviceMemory workspace(*bytes);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, *bytes), cudaSuccess);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status status = cuda::LaunchBatch({&item, 1}, workspace.get(), *bytes, stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const int64_t length : {4000, 2000, 100, 1}) {
    auto* const lengths = const_cast<int64_t*>(owned.attention.kv_lengths);
    lengths[0] = length;
    owned.ResetOutput();
    ASSERT_TRUE(run.Prepare().ok());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_TRUE(run.Fetch().ok());
    const RowsReport report = CheckAllRows(owned.attention);
    EXPECT_TRUE(report.ok) << length << " " << report.detail;
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace attend::test
