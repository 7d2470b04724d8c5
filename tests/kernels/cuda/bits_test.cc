// SPDX-License-Identifier: Apache-2.0
//
// Nothing but the inputs may change a bit of an answer: neither the location of its memory, nor
// other work beside it, nor repetition.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// The same sequences alone, together, elsewhere in memory and at another alignment, where the
// kernel supports that: same bits. (For batches that use another variant see alone_test.cc.)
TEST(CudaBits, BatchAndPlaceDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    for (const int64_t dim : {64, 80, 128, 192}) {
      ProblemSpec spec = MakeSpec(4, 4, 2, 200, 333, dim, dim, dtype);
      spec.problem.mask.right = 0;
      for (const KernelId kernel : kCudaKernels) {
        OwnedAttention together = MakeAttention(spec, seed);
        if (!CanRun(together.attention, kernel)) continue;
        ASSERT_TRUE(RunOnDevice(&together, kernel).ok());
        ProblemSpec elsewhere = spec;
        elsewhere.layout = Layout::kStrided;
        elsewhere.misaligned_elements = 3;
        OwnedAttention moved = MakeAttention(elsewhere, seed);
        const bool moves = CanRun(moved.attention, kernel);
        EXPECT_TRUE(moves || kernel == KernelId::kCudaFlashSm90);
        if (moves) {
          ASSERT_TRUE(RunOnDevice(&moved, kernel).ok());
        }
        for (int64_t b = 0; b < 4; ++b) {
          EXPECT_TRUE(!moves || SameBits(Rows(together, b, 200), Rows(moved, b, 200)))
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

// O and LSE of all sequences.
std::vector<float> AllRows(const OwnedAttention& owned) {
  std::vector<float> values;
  for (int64_t b = 0; b < owned.attention.problem.batch; ++b) {
    const std::vector<float> rows = Rows(owned, b, owned.attention.problem.len_q);
    values.insert(values.end(), rows.begin(), rows.end());
  }
  return values;
}

// The first of `problems` among the others in one launch, the queue in any order.
Status RunTogether(std::vector<OwnedAttention>* problems, KernelId kernel) {
  std::vector<std::unique_ptr<DeviceRun>> runs;
  std::vector<cuda::LaunchItem> items;
  for (OwnedAttention& owned : *problems) {
    owned.ResetOutput();
    runs.push_back(std::make_unique<DeviceRun>(&owned, kernel));
    ATTEND_RETURN_IF_ERROR(runs.back()->Prepare());
    items.push_back({kernel, runs.back()->attention()});
  }
  std::swap(items.front(), items[items.size() / 2]);
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes(items);
  if (!bytes.ok()) return bytes.status();
  const DeviceMemory workspace(*bytes);
  if (workspace.get() == nullptr ||
      cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes) != cudaSuccess) {
    return ResourceExhausted("no device memory for the workspace");
  }
  ATTEND_RETURN_IF_ERROR(cuda::LaunchBatch(items, workspace.get(), *bytes, nullptr));
  return runs.front()->Fetch();
}

// The same problem elsewhere: in another layout, where neither Q, K, V nor O begin on 128-byte
// boundaries, and with an O that the copy engine cannot address (it is then written otherwise).
std::vector<OwnedAttention> Elsewhere(ProblemSpec spec, uint64_t seed) {
  std::vector<OwnedAttention> moved;
  spec.misaligned_elements = 8;
  moved.push_back(MakeAttention(spec, seed));
  spec.layout = Layout::kBLHD;
  moved.push_back(MakeAttention(spec, seed));
  spec.misaligned_elements = 0;
  moved.push_back(MakeAttention(spec, seed));
  Attention& last = moved.back().attention;
  last.o.data = static_cast<char*>(last.o.data) + DTypeBytes(spec.problem.dtype);
  return moved;
}

// Also of cuda_flash_sm90: other memory, other neighbours in the launch.
TEST(CudaBits, PlaceAndNeighboursDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      ProblemSpec spec = MakeSpec(2, 4, 2, 200, 333, dim, dim, dtype);
      spec.problem.mask.right = 0;
      for (const KernelId kernel :
           {KernelId::kCudaFlashFp32, KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
        OwnedAttention alone = MakeAttention(spec, seed);
        if (!CanRun(alone.attention, kernel)) continue;
        ASSERT_TRUE(RunOnDevice(&alone, kernel).ok());
        const std::vector<float> expected = AllRows(alone);
        const std::string label = Label(spec, kernel, -1, seed);
        for (OwnedAttention& moved : Elsewhere(spec, seed)) {
          ASSERT_TRUE(CanRun(moved.attention, kernel));
          ASSERT_TRUE(RunOnDevice(&moved, kernel).ok());
          EXPECT_TRUE(SameBits(AllRows(moved), expected)) << "elsewhere " << label;
        }
        std::vector<OwnedAttention> together;
        together.push_back(MakeAttention(spec, seed));
        for (const auto& [len_q, len_k] :
             {std::pair<int64_t, int64_t>{700, 33}, {1, 900}, {65, 0}, {200, 333}}) {
          ProblemSpec other = MakeSpec(1, 4, 2, len_q, len_k, dim, dim, dtype);
          other.problem.mask.right = len_k == 333 ? -1 : 0;
          together.push_back(MakeAttention(other, seed + static_cast<uint64_t>(len_q)));
          const Status status = RunTogether(&together, kernel);
          ASSERT_TRUE(status.ok()) << status.ToString();
          EXPECT_TRUE(SameBits(AllRows(together.front()), expected))
              << "of " << together.size() << " together, " << label;
        }
      }
    }
  }
}

// O of a chain of launches, each with the O of the previous one as its Q, by each of `kernels` in
// turn, with or without waiting for each: a launch may begin before the previous one has ended.
std::vector<char> Chain(const Attention& first, const std::vector<KernelId>& kernels, int64_t bytes,
                        bool wait) {
  const DeviceMemory places[] = {DeviceMemory(bytes), DeviceMemory(bytes)};
  int64_t workspace_bytes = 0;
  for (const KernelId kernel : kernels) {
    const cuda::LaunchItem item = {kernel, first};
    const Result<int64_t> needed = cuda::BatchWorkspaceBytes({&item, 1});
    EXPECT_TRUE(needed.ok());
    workspace_bytes = std::max(workspace_bytes, *needed);
  }
  const DeviceMemory workspace(workspace_bytes);
  EXPECT_EQ(cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes), cudaSuccess);
  EXPECT_EQ(cudaMemset(places[1].get(), 0xff, static_cast<size_t>(bytes)), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(places[0].get(), first.q.data, static_cast<size_t>(bytes),
                       cudaMemcpyDeviceToDevice),
            cudaSuccess);
  constexpr int kLaunches = 40;
  for (int n = 0; n < kLaunches; ++n) {
    cuda::LaunchItem item = {kernels[n % kernels.size()], first};
    item.attention.q.data = places[n % 2].get();
    item.attention.o.data = places[(n + 1) % 2].get();
    EXPECT_TRUE(cuda::LaunchBatch({&item, 1}, workspace.get(), workspace_bytes, nullptr).ok());
    if (wait) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
  std::vector<char> last(static_cast<size_t>(bytes));
  EXPECT_EQ(
      cudaMemcpy(last.data(), places[kLaunches % 2].get(), last.size(), cudaMemcpyDeviceToHost),
      cudaSuccess);
  return last;
}

// One attention in the launch's parameter, with sinks, and with lengths on the device.
TEST(CudaBits, ConsecutiveLaunchesSeeEarlierResults) {
  const uint64_t seed = FreshSeed();
  const std::vector<KernelId> chains[] = {
      {KernelId::kCudaFlashSm80},
      {KernelId::kCudaFlashSm90},
      {KernelId::kCudaFlashSm90, KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90,
       KernelId::kCudaFlashSm90, KernelId::kCudaNaive, KernelId::kCudaFlashSm90,
       KernelId::kCudaFlashFp32}};
  struct Case {
    int64_t dim, length;
    bool sinks, lengths;
  };
  for (const Case& each : {Case{64, 100, false, false},  // few blocks
                           {64, 1500, false, false},     // blocks that claim second tiles
                           {128, 1500, true, false},
                           {192, 700, false, true},
                           {256, 300, true, false}}) {
    ProblemSpec spec =
        MakeSpec(2, 16, 4, each.length, each.length, each.dim, each.dim, DType::kFloat16);
    spec.problem.mask.right = 0;
    spec.problem.has_sinks = each.sinks;
    if (each.lengths) spec.kv_lengths = {each.length, each.length / 2};
    for (const auto& kernels : chains) {
      OwnedAttention owned = MakeAttention(spec, seed);
      const auto can_run = [&](KernelId kernel) { return CanRun(owned.attention, kernel); };
      if (!std::all_of(kernels.begin(), kernels.end(), can_run)) continue;
      DeviceRun run(&owned, kernels.front());
      ASSERT_TRUE(run.Prepare().ok());
      const int64_t bytes = 2 * 16 * each.length * each.dim * DTypeBytes(spec.problem.dtype);
      const std::vector<char> waited = Chain(run.attention(), kernels, bytes, true);
      for (int n = 0; n < 3; ++n) {
        ASSERT_TRUE(Chain(run.attention(), kernels, bytes, false) == waited)
            << n << " of " << kernels.size() << " kernels, " << Describe(spec);
      }
    }
  }
}

// Host memory that can be copied quickly.
class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes) {
    void* data = nullptr;
    if (cudaMallocHost(&data, bytes) == cudaSuccess) data_ = static_cast<char*>(data);
  }
  ~PinnedMemory() { (void)cudaFreeHost(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  char* get() const { return data_; }

 private:
  char* data_ = nullptr;
};

// Runs repeatedly, with the output's memory overwritten before each run.
void Repeat(const ProblemSpec& spec, KernelId kernel, int config, int runs, uint64_t seed) {
  OwnedAttention owned = MakeAttention(spec, seed);
  if (!CanRun(owned.attention, kernel)) return;
  const std::string label = Label(spec, kernel, config, seed);
  DeviceRun run(&owned, kernel);
  const Status status = run.Run(config);
  ASSERT_TRUE(status.ok()) << status.ToString() << "\n" << label;
  const auto bytes = static_cast<size_t>(owned.output.bytes);
  const PinnedMemory got(bytes);
  ASSERT_NE(got.get(), nullptr);
  std::vector<char> first;
  const int scaled = static_cast<int>(std::max(2.0, std::ceil(runs * TestScale())));
  for (int n = 0; n < scaled; ++n) {
    ASSERT_EQ(cudaMemsetAsync(run.output(), 0xff, bytes, nullptr), cudaSuccess);
    ASSERT_TRUE(run.Launch(config).ok()) << label;
    ASSERT_EQ(cudaMemcpyAsync(got.get(), run.output(), bytes, cudaMemcpyDeviceToHost, nullptr),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess) << label;
    if (n == 0) first.assign(got.get(), got.get() + bytes);
    ASSERT_EQ(std::memcmp(first.data(), got.get(), bytes), 0) << "run " << n << " " << label;
  }
}

TEST(CudaBits, AThousandRunsGiveTheSameBits) {
  const uint64_t seed = FreshSeed();
  ProblemSpec causal = MakeSpec(2, 4, 2, 257, 300, 64, 64);
  causal.problem.mask.right = 0;
  ProblemSpec window = MakeSpec(1, 8, 8, 150, 500, 128, 96, DType::kBFloat16);
  window.problem.mask = {Alignment::kBottomRight, 64, 16};
  window.problem.has_bias = true;
  window.problem.has_alibi = true;
  ProblemSpec half = MakeSpec(2, 20, 4, 700, 900, 128, 128, DType::kFloat16);
  half.problem.mask.right = 0;
  ProblemSpec bits = half;
  bits.problem.has_bias = true;
  bits.bias_dtype = DType::kBit;
  bits.bias_masked_share = 0.3;
  for (const ProblemSpec& spec : {causal, window, half, bits}) {
    for (const KernelId kernel : kCudaKernels) {
      ASSERT_NO_FATAL_FAILURE(Repeat(spec, kernel, cuda::kDefaultConfig, 1000, seed));
    }
  }
}

// All variants of the Tensor Core kernels, with more tiles than blocks fit the device at once (so
// that blocks claim second ones): the default of each head dim 1000 times, with dropout too, the
// others 200 times.
TEST(CudaBits, EveryVariantGivesTheSameBitsEachTime) {
  const uint64_t seed = FreshSeed();
  std::set<const void*> seen;
  for (const auto& [dim, dim_v] : {std::pair<int64_t, int64_t>{64, 64},
                                   {32, 32},
                                   {96, 96},
                                   {128, 128},
                                   {192, 192},
                                   {192, 128},
                                   {256, 256}}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      // cuda_flash_sm80 has variants for each, cuda_flash_sm90 for dropout.
      for (const auto& [softcap, dropout] :
           {std::pair<float, int32_t>{0.0f, 0}, {20.0f, 0}, {0.0f, 6554}}) {
        ProblemSpec spec = MakeSpec(dim > 128 ? 2 : 4, 24, 4, 340, 340, dim, dim_v, dtype);
        spec.problem.mask.right = 0;
        spec.problem.softcap = softcap;
        spec.problem.dropout = dropout;
        for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
          for (const int config : Configs(spec.problem, kernel)) {
            const void* variant = cuda::VariantsFor(kernel, spec.problem)[config].kernel;
            if (!seen.insert(variant).second) continue;
            const bool often = config == 0 && dtype == DType::kFloat16 && softcap == 0.0f;
            ASSERT_NO_FATAL_FAILURE(Repeat(spec, kernel, config, often ? 1000 : 200, seed));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
