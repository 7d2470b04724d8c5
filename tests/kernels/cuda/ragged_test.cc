// SPDX-License-Identifier: Apache-2.0
//
// The ragged launch: a problem's bits do not depend on what is launched beside it.

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

// One problem on the device, and the bytes that it gives alone.
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

TEST(CudaRagged, TooSmallAWorkspaceIsRefused) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 8, 8, 8, 8), FreshSeed());
  const cuda::LaunchItem item{KernelId::kCudaFlashFp32, owned.attention};
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes({&item, 1});
  ASSERT_TRUE(bytes.ok());
  const Status status = cuda::LaunchBatch({&item, 1}, nullptr, *bytes - 1, nullptr);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace attend::test
