// SPDX-License-Identifier: Apache-2.0
//
// The ragged launch: a problem's bits do not depend on the other problems of the launch.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// One problem on the device, and its bytes when computed alone.
struct Known {
  ProblemSpec spec;
  KernelId kernel;
  OwnedAttention owned;
  std::unique_ptr<DeviceRun> run;
  std::vector<std::byte> alone;
};

// Room for two copies at once, as the second would be a race.
std::vector<std::unique_ptr<Known>> MakePool(uint64_t seed, size_t count) {
  std::vector<std::unique_ptr<Known>> pool;
  for (uint64_t n = seed; pool.size() < count; ++n) {
    ProblemSpec spec = n % 2 == 0 ? AlignedSpec(n) : RandomSpec(n, 5e5);
    if (n % 3 == 0) spec = WithDropout(spec, n);
    if (n % 6 == 2) {
      spec.problem.has_bias = true;
      spec.bias_dtype = DType::kBit;
      spec.bias_masked_share = 0.3;
    }
    for (const KernelId kernel :
         {KernelId::kCudaFlashFp32, KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
      auto known = std::make_unique<Known>();
      known->spec = spec;
      known->kernel = kernel;
      known->owned = MakeAttention(spec, n);
      if (!CanRun(known->owned.attention, kernel)) continue;
      known->run = std::make_unique<DeviceRun>(&known->owned, kernel);
      const Status status = known->run->Run();
      EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << Describe(spec);
      known->alone = known->owned.OutputBytes();
      pool.push_back(std::move(known));
    }
  }
  return pool;
}

TEST(CudaRagged, ProblemsGiveTheSameBitsInAThousandBatchesAsAlone) {
  const uint64_t seed = FreshSeed();
  const std::vector<std::unique_ptr<Known>> pool = MakePool(seed, 60);
  constexpr int64_t kWorkspaceBytes = 4 << 20;
  const DeviceMemory workspace(kWorkspaceBytes);
  ASSERT_NE(workspace.get(), nullptr);
  ASSERT_EQ(cudaMemset(workspace.get(), 0xff, kWorkspaceBytes), cudaSuccess);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes), cudaSuccess);
  std::mt19937_64 random(seed);
  const int batches = static_cast<int>(std::ceil(1000 * TestScale()));
  for (int n = 0; n < batches; ++n) {
    std::vector<Known*> batch;
    std::vector<cuda::LaunchItem> items;
    const size_t count = 1 + random() % 12;
    const size_t first = random() % pool.size();
    const size_t step = 1 + 2 * (random() % 3);  // no problem twice
    for (size_t i = 0; i < std::min(count, pool.size() / step); ++i) {
      Known* known = pool[(first + i * step) % pool.size()].get();
      known->owned.ResetOutput();
      ASSERT_TRUE(known->run->Prepare().ok());
      batch.push_back(known);
      items.push_back({known->kernel, known->run->attention()});
    }
    const Status status = cuda::LaunchBatch(items, workspace.get(), kWorkspaceBytes, nullptr);
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (Known* known : batch) {
      ASSERT_TRUE(known->run->Fetch().ok());
      ASSERT_EQ(known->owned.OutputBytes(), known->alone)
          << "batch " << n << " of " << batch.size() << ": " << KernelName(known->kernel) << " "
          << Describe(known->spec) << "\nATTEND_TEST_SEED=" << seed;
    }
  }
  std::vector<char> queue(cuda::kTileQueueBytes, 1);
  ASSERT_EQ(cudaMemcpy(queue.data(), workspace.get(), queue.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(queue, std::vector<char>(queue.size(), 0)) << "launches leave the tile queue at zero";
}

// A list of two attentions that differ from the next launch's in D and in where O is.
struct Listed {
  std::vector<std::unique_ptr<Known>> of;
  std::vector<cuda::LaunchItem> items;
  std::vector<char> o;  // of the first, alone

  Listed(int64_t dim, uint64_t seed) {
    for (const int64_t length : {300, 70}) {
      auto known = std::make_unique<Known>();
      known->spec = MakeSpec(1, 4, 4, length, length, dim, dim, DType::kFloat16);
      known->owned = MakeAttention(known->spec, seed);
      if (!CanRun(known->owned.attention, KernelId::kCudaFlashSm90)) return;
      known->run = std::make_unique<DeviceRun>(&known->owned, KernelId::kCudaFlashSm90);
      EXPECT_TRUE(known->run->Run().ok());
      items.push_back({KernelId::kCudaFlashSm90, known->run->attention()});
      of.push_back(std::move(known));
    }
    o.resize(static_cast<size_t>(2 * 4 * 300 * dim));
    EXPECT_EQ(cudaMemcpy(o.data(), items[0].attention.o.data, o.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
};

// The tensor maps of a list are where those of the previous launch were, which may still be ending.
TEST(CudaRagged, OIsStoredWhereItsOwnLaunchWantsIt) {
  const uint64_t seed = FreshSeed();
  std::vector<Listed> lists;
  for (const int64_t dim : {64, 96, 128}) lists.emplace_back(dim, seed);
  if (lists.front().items.empty()) GTEST_SKIP() << "not on this GPU";
  constexpr int64_t kWorkspaceBytes = 1 << 20;
  constexpr size_t kPlaces = 64, kPlaceBytes = 2 * 4 * 300 * 128;
  const DeviceMemory workspace(kWorkspaceBytes), places(kPlaces * kPlaceBytes);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, kWorkspaceBytes), cudaSuccess);
  const int rounds = static_cast<int>(std::ceil(20 * TestScale()));
  std::vector<char> got(kPlaceBytes);
  for (int round = 0; round < rounds; ++round) {
    ASSERT_EQ(cudaMemset(places.get(), 0xff, kPlaces * kPlaceBytes), cudaSuccess);
    for (size_t n = 0; n < kPlaces; ++n) {
      Listed& list = lists[n % lists.size()];
      list.items[0].attention.o.data = places.get() + n * kPlaceBytes;
      ASSERT_TRUE(cuda::LaunchBatch(list.items, workspace.get(), kWorkspaceBytes, nullptr).ok());
    }
    for (size_t n = 0; n < kPlaces; ++n) {
      const std::vector<char>& expected = lists[n % lists.size()].o;
      ASSERT_EQ(cudaMemcpy(got.data(), places.get() + n * kPlaceBytes, kPlaceBytes,
                           cudaMemcpyDeviceToHost),
                cudaSuccess);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), got.begin()))
          << "launch " << n << " of round " << round << "\nATTEND_TEST_SEED=" << seed;
      ASSERT_TRUE(std::all_of(got.begin() + static_cast<ptrdiff_t>(expected.size()), got.end(),
                              [](char byte) { return byte == '\xff'; }))
          << "beyond the O of launch " << n;
    }
  }
}

TEST(CudaRagged, AWorkspaceThatIsTooSmallIsRefused) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 8, 8, 8, 8), FreshSeed());
  const cuda::LaunchItem item{KernelId::kCudaFlashFp32, owned.attention};
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes({&item, 1});
  ASSERT_TRUE(bytes.ok());
  const Status status = cuda::LaunchBatch({&item, 1}, nullptr, *bytes - 1, nullptr);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace attend::test
