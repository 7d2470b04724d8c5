// SPDX-License-Identifier: Apache-2.0
//
// The decoding kernels with more packed rows than one tile, which are cut into chunks: compared
// with double precision, and with themselves alone, in a batch, in a list, in pages, as forks, in a
// graph and on fewer multiprocessors.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/ragged/launch_options.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/cuda/decode/decode_kernels.h"

namespace attend::test {
namespace {

// Two KV heads, a causal mask or a window half of the time, any score terms.
ProblemSpec ChunkSpec(std::mt19937_64* random, int64_t rows, int64_t group, int64_t dim) {
  const int64_t batch = Pick(random, {1, 1, 2, 3});
  const int64_t len_k =
      Pick(random, {0, 1, 63, 100, 128, 513, 1000, 2048, 2049, 4097, 8193, 16500});
  ProblemSpec spec =
      MakeSpec(batch, 2 * group, 2, rows, len_k, dim, Pick(random, {dim, dim, dim, 64}),
               (*random)() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
  Problem& p = spec.problem;
  spec.layout = (*random)() % 2 == 0 ? Layout::kBHLD : Layout::kBLHD;
  if ((*random)() % 4 != 0) p.mask.right = Pick(random, {0, 0, 3});
  if ((*random)() % 3 == 0) p.mask.left = Pick(random, {0, 5, 100, 700, 3000});
  if ((*random)() % 4 == 0) p.mask.alignment = Alignment::kTopLeft;
  if ((*random)() % 4 == 0) p.softcap = 20.0f;
  p.has_sinks = (*random)() % 4 == 0;
  p.has_alibi = (*random)() % 4 == 0;
  if ((*random)() % 4 == 0) {
    for (int64_t b = 0; b < batch; ++b) {
      spec.kv_lengths.push_back(static_cast<int64_t>((*random)() % (len_k + 1)));
      spec.q_lengths.push_back(static_cast<int64_t>((*random)() % (rows + 1)));
    }
    p.packed = (*random)() % 3 == 0;
  }
  return spec;
}

class CudaDecodeChunks : public DecodeKernelTest {};
INSTANTIATE_TEST_SUITE_P(Kernels, CudaDecodeChunks, DecodeKernels(), NameOfKernel);

TEST_P(CudaDecodeChunks, AnyRowsAndGroupAreRight) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (const int64_t rows : {17, 24, 31, 32, 33, 64, 100, 512}) {
    for (const int64_t group : {1, 3, 8}) {
      for (const int64_t dim : {64, 96, 128, 256}) {
        if (TestScale() < 1 && random() % 4 != 0) continue;
        const uint64_t own = seed + static_cast<uint64_t>(rows * group + dim);
        ProblemSpec spec = ChunkSpec(&random, rows, group, dim);
        if (random() % 2 == 0) spec = InPages(spec, Pick(&random, {16, 64}));
        const Problem& made = MakeAttention(spec, own).attention.problem;
        for (const int config : Configs(made, kernel_)) {
          const Status status = RunAndCheck(spec, kernel_, config, own, kCheckWork);
          ASSERT_TRUE(status.ok()) << status.ToString();
        }
      }
    }
  }
}

TEST_P(CudaDecodeChunks, LongSequencesAreRight) {
  const uint64_t seed = FreshSeed();
  for (const int64_t len : {9000, 40000, 140000}) {
    for (const int64_t rows : {17, 64, 100}) {
      ProblemSpec spec = MakeSpec(1, 8, 1, rows, len, 128, 128, DType::kBFloat16);
      spec.problem.mask.right = 0;
      for (const ProblemSpec& each : {spec, InPages(spec, 64)}) {
        const Status status = RunAndCheck(each, kernel_, -1, seed, 1e8);
        ASSERT_TRUE(status.ok()) << status.ToString();
      }
    }
  }
}

// Enough heads for one KV head that chunks have a single query row.
TEST_P(CudaDecodeChunks, ARowsHeadsMayBeInSeveralChunks) {
  const uint64_t seed = FreshSeed();
  for (const int64_t group : {129, 200, 320}) {
    for (const int64_t rows : {1, 3}) {
      ProblemSpec spec = MakeSpec(2, group, 1, rows, 3000, 128, 128, DType::kFloat16);
      spec.problem.mask.right = 0;
      spec.problem.has_alibi = spec.problem.has_sinks = true;
      const Status status = RunAndCheck(spec, kernel_, -1, seed, kCheckWork);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
}

// NaN and Inf in V, at keys that only some chunks see.
TEST_P(CudaDecodeChunks, ValuesThatAreNotFiniteReachOnlyRowsThatSeeThem) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128, 256}) {
    ProblemSpec spec = MakeSpec(1, 8, 1, 64, 3000, dim, dim, DType::kBFloat16);
    spec.problem.mask.right = 0;
    OwnedAttention owned = MakeAttention(spec, seed);
    OwnedAttention plain = MakeAttention(spec, seed);
    const Attention& a = owned.attention;
    constexpr int64_t kRow = 40;  // of the query whose own key is not finite
    Set(a, owned.V(0, 0, 3000 - 64 + kRow, 5), INFINITY);
    ASSERT_TRUE(RunOnDevice(&owned, kernel_).ok());
    ASSERT_TRUE(RunOnDevice(&plain, kernel_).ok());
    for (int64_t h = 0; h < 8; ++h) {
      for (int64_t i = 0; i < 64; ++i) {
        const float value = Get(a, owned.O(0, h, i, 5));
        EXPECT_EQ(std::isfinite(value), i < kRow) << h << " " << i << " D" << dim;
        if (i >= kRow / 16 * 16) continue;  // of its chunk
        EXPECT_EQ(value, Get(plain.attention, plain.O(0, h, i, 5))) << h << " " << i;
      }
    }
  }
}

// ---- bits ---------------------------------------------------------------------------------------

// Sequence b of a batch in pages, or with lengths, as a problem of its own.
void TakeSequence(int64_t b, int64_t len_k, Attention* a) {
  a->problem.batch = 1;
  a->problem.len_k = len_k;
  a->kv_lengths = nullptr;
  a->q.data = static_cast<const char*>(a->q.data) + 2 * b * a->q.stride_b;
  a->o.data = static_cast<char*>(a->o.data) + 2 * b * a->o.stride_b;
  a->lse += b * a->lse_stride_b;
  a->kv_pages.pages += b * a->kv_pages.stride;
}

TEST_P(CudaDecodeChunks, ABatchsSequencesAreAsAlone) {
  const uint64_t seed = FreshSeed();
  const std::vector<int64_t> lengths = {9000, 70, 130, 8192, 2049, 600};
  for (const int64_t rows : {17, 32, 64, 100}) {
    for (const int64_t page_rows : {16, 64}) {
      ProblemSpec spec = MakeSpec(6, 16, 2, rows, 9000, 128, 128, DType::kBFloat16);
      spec.problem.mask.right = 0;
      spec.kv_lengths = lengths;
      spec = InPages(spec, page_rows);
      OwnedAttention together = MakeAttention(spec, seed);
      ASSERT_TRUE(RunOnDevice(&together, kernel_).ok());
      for (int64_t b = 0; b < 6; ++b) {
        OwnedAttention alone = MakeAttention(spec, seed);
        TakeSequence(b, lengths[static_cast<size_t>(b)], &alone.attention);
        ASSERT_TRUE(RunOnDevice(&alone, kernel_).ok());
        EXPECT_TRUE(SameBits(Rows(together, b, rows), Rows(alone, 0, rows))) << b;
      }
    }
  }
}

TEST_P(CudaDecodeChunks, PagesDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (const int64_t rows : {17, 24, 33, 64, 100, 512}) {
    for (const int64_t group : {1, 3, 8}) {
      ProblemSpec spec = ChunkSpec(&random, rows, group, Pick(&random, {64, 96, 128, 256}));
      OwnedAttention dense = MakeAttention(spec, seed);
      ASSERT_TRUE(RunOnDevice(&dense, kernel_).ok());
      for (const int64_t page_rows : {16, 64}) {
        OwnedAttention paged = MakeAttention(InPages(spec, page_rows), seed);
        ASSERT_TRUE(RunOnDevice(&paged, kernel_).ok());
        EXPECT_EQ(dense.OutputBytes(), paged.OutputBytes())
            << Label(InPages(spec, page_rows), kernel_, -1, seed);
      }
    }
  }
}

// A fork reads the other sequence's pages with the same Q.
TEST_P(CudaDecodeChunks, ForksHaveTheSameBits) {
  const uint64_t seed = FreshSeed();
  for (const int64_t rows : {17, 40, 64}) {
    const ProblemSpec spec =
        InPages(MakeSpec(2, 16, 2, rows, 5000, 128, 128, DType::kBFloat16), 16);
    OwnedAttention owned = MakeAttention(spec, seed);
    Attention& a = owned.attention;
    auto* const table = const_cast<int32_t*>(a.kv_pages.pages);
    std::copy_n(table, a.kv_pages.stride, table + a.kv_pages.stride);
    for (int64_t h = 0; h < 16; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t d = 0; d < 128; ++d) Set(a, owned.Q(1, h, i, d), Get(a, owned.Q(0, h, i, d)));
      }
    }
    ASSERT_TRUE(RunOnDevice(&owned, kernel_).ok());
    EXPECT_TRUE(SameBits(Rows(owned, 0, rows), Rows(owned, 1, rows))) << rows;
    OwnedAttention alone = MakeAttention(spec, seed);
    TakeSequence(0, 5000, &alone.attention);
    ASSERT_TRUE(RunOnDevice(&alone, kernel_).ok());
    EXPECT_TRUE(SameBits(Rows(owned, 0, rows), Rows(alone, 0, rows))) << rows;
  }
}

Status RunItems(const std::vector<cuda::LaunchItem>& items, const cuda::LaunchOptions& options) {
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes(items);
  if (!bytes.ok()) return bytes.status();
  const DeviceMemory workspace(*bytes);
  if (workspace.get() == nullptr) return ResourceExhausted("no device memory for the workspace");
  (void)cudaMemset(workspace.get(), 0xff, static_cast<size_t>(*bytes));
  (void)cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes);
  ATTEND_RETURN_IF_ERROR(cuda::LaunchBatch(items, workspace.get(), *bytes, nullptr, options));
  std::vector<char> head(cuda::kTileQueueBytes, 1);
  (void)cudaMemcpy(head.data(), workspace.get(), head.size(), cudaMemcpyDeviceToHost);
  if (std::any_of(head.begin(), head.end(), [](char byte) { return byte != 0; })) {
    return Internal("a launch has not left the counters at zero");
  }
  return Status();
}

// Shares depend on the number of blocks, and on the planner: the host for equal sequences,
// otherwise the device.
TEST_P(CudaDecodeChunks, SharesDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  for (const int64_t rows : {17, 32, 50, 64}) {
    for (const int64_t len_k : {700, 9000, 33000}) {
      ProblemSpec spec = MakeSpec(2, 16, 2, rows, len_k, 128, 128, DType::kFloat16);
      spec.problem.mask.right = 0;
      spec.q_lengths = {rows, rows};
      spec.kv_lengths = {len_k, len_k};
      OwnedAttention owned = MakeAttention(spec, seed);
      ASSERT_TRUE(RunOnDevice(&owned, kernel_).ok());
      const std::vector<std::byte> expected = owned.OutputBytes();
      owned.attention.q_lengths = owned.attention.kv_lengths = nullptr;
      ASSERT_TRUE(RunOnDevice(&owned, kernel_).ok());
      EXPECT_EQ(owned.OutputBytes(), expected) << rows << " rows, planned by the host";
      for (const int unused : {1, 65, 100, 131}) {
        owned.ResetOutput();
        DeviceRun run(&owned, kernel_);
        ASSERT_TRUE(run.Prepare().ok());
        const Status status =
            RunItems({{kernel_, run.attention()}}, {.multiprocessors_free = unused});
        ASSERT_TRUE(status.ok()) << status.ToString();
        ASSERT_TRUE(run.Fetch().ok());
        EXPECT_EQ(owned.OutputBytes(), expected) << rows << " rows, " << unused << " free";
      }
    }
  }
}

// With and without separate producers, the same warps multiply the same tiles in the same order.
TEST_P(CudaDecodeChunks, ProducersDoNotChangeBits) {
  if (kernel_ != KernelId::kCudaDecodeSm90) GTEST_SKIP() << "it has none";
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (const int64_t dim : {64, 96, 128}) {
    for (const int64_t rows : {9, 16, 17, 33, 64, 100}) {
      for (int n = 0; n < 4; ++n) {
        ProblemSpec spec = ChunkSpec(&random, rows, 8, dim);
        if (n % 2 == 1) spec = InPages(spec, Pick(&random, {16, 64}));
        OwnedAttention owned = MakeAttention(spec, seed);
        const Problem& p = owned.attention.problem;
        if (p.len_q * p.group() <= 64) continue;
        ASSERT_EQ(Configs(p, kernel_).size(), 2u);
        ASSERT_TRUE(RunOnDevice(&owned, kernel_, 0).ok());
        const std::vector<std::byte> expected = owned.OutputBytes();
        ASSERT_TRUE(RunOnDevice(&owned, kernel_, 1).ok());
        EXPECT_EQ(owned.OutputBytes(), expected) << Label(spec, kernel_, 1, seed);
      }
    }
  }
}

// Splits with non-finite values end a stream early, again and again.
TEST_P(CudaDecodeChunks, EverySplitMayHaveNonFiniteValues) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 96, 128, 256}) {
    for (const int64_t stride : {100, 3000}) {
      for (const int64_t rows : {1, 2, 40}) {
        OwnedAttention owned =
            MakeAttention(MakeSpec(1, 8, 1, rows, 9000, dim, dim, DType::kBFloat16), seed);
        const Attention& a = owned.attention;
        for (int64_t key = 50; key < 9000; key += stride) Set(a, owned.V(0, 0, key, 3), INFINITY);
        ASSERT_TRUE(RunOnDevice(&owned, kernel_).ok());
        for (int64_t h = 0; h < 8; ++h) {
          for (int64_t i = 0; i < rows; ++i) {
            ASSERT_TRUE(std::isinf(Get(a, owned.O(0, h, i, 3)))) << h << " " << i << " D" << dim;
            ASSERT_TRUE(std::isfinite(Get(a, owned.O(0, h, i, 2)))) << h << " " << i << " D" << dim;
          }
        }
      }
    }
  }
}

// Chunks and single tiles of any problems in one list.
TEST_P(CudaDecodeChunks, NeighboursDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (int n = 0; n < static_cast<int>(20 * TestScale()) + 1; ++n) {
    std::vector<OwnedAttention> owned;
    std::vector<std::vector<std::byte>> alone;
    std::vector<std::unique_ptr<DeviceRun>> runs;
    std::vector<cuda::LaunchItem> items;
    const int64_t dim = Pick(&random, {64, 128, 256});
    for (size_t i = 0; i < 2 + random() % 5; ++i) {
      ProblemSpec spec = ChunkSpec(&random, Pick(&random, {1, 9, 16, 17, 33, 64, 100}),
                                   Pick(&random, {1, 3, 8}), dim);
      if (random() % 2 == 0) spec = InPages(spec, Pick(&random, {16, 64}));
      owned.push_back(MakeAttention(spec, seed + i));
      ASSERT_TRUE(RunOnDevice(&owned.back(), kernel_).ok());
      alone.push_back(owned.back().OutputBytes());
    }
    for (OwnedAttention& each : owned) {
      each.ResetOutput();
      runs.push_back(std::make_unique<DeviceRun>(&each, kernel_));
      ASSERT_TRUE(runs.back()->Prepare().ok());
      items.push_back({kernel_, runs.back()->attention()});
    }
    const Status status = RunItems(items, {});
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (size_t i = 0; i < owned.size(); ++i) {
      ASSERT_TRUE(runs[i]->Fetch().ok());
      EXPECT_EQ(owned[i].OutputBytes(), alone[i])
          << i << " of " << owned.size() << " " << Describe(owned[i].attention.problem)
          << "\nATTEND_TEST_SEED=" << seed;
    }
  }
}

// A captured verification of a draft runs again with other lengths of keys and of the draft.
TEST_P(CudaDecodeChunks, GraphsFollowTheLengths) {
  const uint64_t seed = FreshSeed();
  constexpr int64_t kRows = 40;
  ProblemSpec spec = MakeSpec(2, 8, 1, kRows, 5000, 128, 128, DType::kFloat16);
  spec.problem.mask.right = 0;
  spec.q_lengths = {kRows, kRows};
  spec.kv_lengths = {4000, 5000};
  OwnedAttention owned = MakeAttention(InPages(spec, 64), seed);
  DeviceRun run(&owned, kernel_);
  ASSERT_TRUE(run.Run().ok());
  const cuda::LaunchItem item{kernel_, run.attention()};
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes({&item, 1});
  const DeviceMemory workspace(*bytes);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, static_cast<size_t>(*bytes)), cudaSuccess);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status status = cuda::LaunchBatch({&item, 1}, workspace.get(), *bytes, stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const int64_t length : {3999, 2000, 100, 39, 1}) {
    const_cast<int64_t*>(owned.attention.kv_lengths)[0] = length;
    const_cast<int64_t*>(owned.attention.q_lengths)[0] = std::min(kRows, length);
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
