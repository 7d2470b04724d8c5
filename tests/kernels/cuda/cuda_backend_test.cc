// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend: batches on concurrent lanes, exactly one Done each, refusals without effect.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// Waits for one Done, and counts further ones.
class Waiter {
 public:
  Done MakeDone() {
    return [this](BatchOutcome outcome) {
      std::lock_guard lock(mutex_);
      ++calls_;
      outcome_ = std::move(outcome);
      ended_.notify_all();
    };
  }

  BatchOutcome Wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return outcome_.has_value(); });
    BatchOutcome outcome = *std::move(outcome_);
    outcome_.reset();
    return outcome;
  }

  int calls() {
    std::lock_guard lock(mutex_);
    return calls_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<BatchOutcome> outcome_;
  int calls_ = 0;
};

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Backend>> backend = MakeCudaBackend(0, BackendOptions{});
    ASSERT_TRUE(backend.ok()) << backend.status().ToString();
    backend_ = std::move(*backend);
  }

  std::unique_ptr<Lane> MakeLane(int64_t workspace_bytes = 1 << 20) {
    Result<std::unique_ptr<Lane>> lane = backend_->MakeLane({workspace_bytes});
    EXPECT_TRUE(lane.ok()) << lane.status().ToString();
    return lane.ok() ? std::move(*lane) : nullptr;
  }

  WorkItem Item(const OwnedAttention& owned, std::string_view kernel = {}) {
    const Result<Selection> selection =
        Select(owned.attention.problem, backend_->info(), kernel, cuda::TraitsOf(owned.attention));
    EXPECT_TRUE(selection.ok()) << selection.status().ToString();
    return owned.Item(selection.ok() ? *selection : Selection{});
  }

  std::unique_ptr<Backend> backend_;
  Waiter waiter_;
};

TEST_F(CudaBackendTest, InfoDescribesTheDevice) {
  const DeviceInfo& info = backend_->info();
  EXPECT_EQ(info.kind, DeviceKind::kCuda);
  EXPECT_EQ(info.name, "cuda:0");
  EXPECT_FALSE(info.description.empty());
  EXPECT_GE(info.compute_capability, 80);
  EXPECT_GT(info.units, 0);
  EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
  EXPECT_GT(info.workspace_bytes_max, 0);
  EXPECT_LE(info.workspace_bytes_max, info.memory_bytes);
}

TEST_F(CudaBackendTest, MixedBatchesAreAnswered) {
  const uint64_t seed = FreshSeed();
  std::unique_ptr<Lane> lane = MakeLane();
  uint64_t next = seed;
  for (int round = 0; round < 40; ++round) {
    std::vector<OwnedAttention> owned;
    std::vector<WorkItem> items;
    for (int n = 0; n <= round % 9; ++n, ++next) {
      ProblemSpec spec = RandomSpec(next, 3e5);
      if (next % 4 == 1) spec = WithDropout(std::move(spec), next);
      owned.push_back(MakeAttention(spec, next));
      const char* kernels[] = {"cuda_naive", "cuda_flash_fp32", "auto"};
      items.push_back(Item(owned.back(), kernels[next % 3]));
      items.back().poison_output = next % 2 == 0;
    }
    const Status status = lane->Submit(items, waiter_.MakeDone());
    ASSERT_TRUE(status.ok()) << status.ToString();
    const BatchOutcome outcome = waiter_.Wait();
    ASSERT_EQ(outcome.statuses.size(), items.size());
    EXPECT_FALSE(outcome.device_lost);
    EXPECT_GE(outcome.copy_in_ns, 0);
    EXPECT_GE(outcome.kernel_ns, 0);
    EXPECT_GE(outcome.copy_out_ns, 0);
    for (size_t n = 0; n < items.size(); ++n) {
      ASSERT_TRUE(outcome.statuses[n].ok()) << outcome.statuses[n].ToString();
      const RowsReport report = CheckAllRows(owned[n].attention);
      ASSERT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed << " "
                             << Describe(owned[n].attention.problem);
    }
  }
  EXPECT_EQ(waiter_.calls(), 40);
}

TEST_F(CudaBackendTest, AnEmptyBatchEnds) {
  std::unique_ptr<Lane> lane = MakeLane(0);
  ASSERT_TRUE(lane->Submit({}, waiter_.MakeDone()).ok());
  EXPECT_TRUE(waiter_.Wait().statuses.empty());
}

TEST_F(CudaBackendTest, LanesRunAtOnceAndDoneComesOncePerBatch) {
  constexpr int kLanes = 6, kBatches = 60;
  const uint64_t seed = FreshSeed();
  std::atomic<int> done_calls = 0;
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int n = 0; n < kLanes; ++n) lanes.push_back(MakeLane());
  for (int n = 0; n < kLanes; ++n) {
    threads.emplace_back([&, n] {
      ProblemSpec spec = MakeSpec(1, 4, 2, 300 + 10 * n, 400, 64, 64);
      spec.problem.mask.right = 0;
      OwnedAttention owned = MakeAttention(spec, seed + static_cast<uint64_t>(n));
      const WorkItem item = Item(owned);
      std::vector<std::byte> first;
      Waiter waiter;
      for (int batch = 0; batch < kBatches; ++batch) {
        owned.ResetOutput();
        ASSERT_TRUE(lanes[static_cast<size_t>(n)]
                        ->Submit({&item, 1},
                                 [&, done = waiter.MakeDone()](BatchOutcome outcome) {
                                   ++done_calls;
                                   done(std::move(outcome));
                                 })
                        .ok());
        const BatchOutcome outcome = waiter.Wait();
        ASSERT_TRUE(outcome.statuses[0].ok()) << outcome.statuses[0].ToString();
        if (batch == 0) {
          const RowsReport report = CheckAllRows(owned.attention);
          EXPECT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed;
          first = owned.OutputBytes();
        }
        ASSERT_EQ(first, owned.OutputBytes()) << "lane " << n << " batch " << batch;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  lanes.clear();
  EXPECT_EQ(done_calls, kLanes * kBatches);
}

TEST_F(CudaBackendTest, ALaneGrowsForALargerBatch) {
  const uint64_t seed = FreshSeed();
  std::unique_ptr<Lane> lane = MakeLane(0);
  for (const int64_t length : {10, 3000, 20, 5000}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 64, length, 128, 128);
    OwnedAttention owned = MakeAttention(spec, seed);
    for (const char* kernel : {"cuda_naive", "cuda_flash_fp32"}) {
      owned.ResetOutput();
      const WorkItem item = Item(owned, kernel);
      ASSERT_TRUE(lane->Submit({&item, 1}, waiter_.MakeDone()).ok());
      ASSERT_TRUE(waiter_.Wait().statuses[0].ok());
      const RowsReport report = CheckAllRows(owned.attention);
      EXPECT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed;
    }
  }
}

TEST_F(CudaBackendTest, MemoryIsCountedWhileLanesHoldIt) {
  EXPECT_EQ(backend_->memory_use().used_bytes, 0);
  EXPECT_EQ(backend_->memory_use().limit_bytes, backend_->info().memory_bytes);
  std::unique_ptr<Lane> first = MakeLane(32 << 20);
  const int64_t one = backend_->memory_use().used_bytes;
  EXPECT_GE(one, 32 << 20);
  std::unique_ptr<Lane> second = MakeLane(32 << 20);
  EXPECT_EQ(backend_->memory_use().used_bytes, 2 * one);
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 16, 16, 2048, 2048, 128, 128), 1);
  const WorkItem item = Item(owned);
  ASSERT_TRUE(second->Submit({&item, 1}, waiter_.MakeDone()).ok());
  EXPECT_TRUE(waiter_.Wait().statuses[0].ok());
  EXPECT_GT(backend_->memory_use().used_bytes, 2 * one) << "it grew for 64 MiB";
  second.reset();
  EXPECT_EQ(backend_->memory_use().used_bytes, one);
  first.reset();
  EXPECT_EQ(backend_->memory_use().used_bytes, 0);
}

// The server keeps small requests away from those that a lane cuts, and asks the backend which they
// are.
TEST_F(CudaBackendTest, ReportsWhichItemsItsLanesCut) {
  const std::unique_ptr<Lane> lane = MakeLane();
  ASSERT_NE(lane, nullptr);
  const ProblemSpec small = MakeSpec(2, 4, 2, 100, 100, 64, 64, DType::kFloat16);
  const ProblemSpec many_bytes = MakeSpec(1, 16, 16, 2048, 2048, 128, 128, DType::kFloat16);
  const ProblemSpec many_flops = MakeSpec(1, 8, 8, 8192, 8192, 16, 16, DType::kFloat32);
  for (const ProblemSpec& spec : {small, many_bytes, many_flops}) {
    const OwnedAttention owned = MakeAttention(spec, 1);
    const WorkItem item = Item(owned);
    const bool in_parts = backend_->RunsInParts(item.attention, item.selection);
    EXPECT_EQ(in_parts, spec.problem.len_q > 100);
    ASSERT_TRUE(lane->Submit({&item, 1}, waiter_.MakeDone()).ok());
    const BatchOutcome outcome = waiter_.Wait();
    EXPECT_TRUE(outcome.statuses[0].ok()) << outcome.statuses[0].ToString();
    EXPECT_EQ(outcome.cut_parts > 0, in_parts);
  }
}

TEST_F(CudaBackendTest, RefusalsHaveNoEffect) {
  std::unique_ptr<Lane> lane = MakeLane();
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 30, 40, 64, 64), FreshSeed());
  const std::vector<std::byte> before = owned.OutputBytes();
  const auto refuse = [&](const WorkItem& item, Code code) {
    const Status status = lane->Submit({&item, 1}, waiter_.MakeDone());
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(before, owned.OutputBytes());
  };
  WorkItem item = Item(owned);
  item.inputs = {{owned.input.data, int64_t{1} << 50}};  // more than any device has
  refuse(item, Code::kResourceExhausted);
  item = Item(owned);
  item.inputs = {{owned.input.data, backend_->info().memory_bytes}};  // more than is free
  refuse(item, Code::kResourceExhausted);
  item = Item(owned);
  item.selection.workspace_bytes = backend_->info().workspace_bytes_max + 1;
  refuse(item, Code::kResourceExhausted);
  item = Item(owned);
  item.selection.kernel = KernelId::kCpuFlash;
  refuse(item, Code::kUnimplemented);
  item = Item(owned);
  item.attention.q.data = owned.output.data;
  refuse(item, Code::kInvalidArgument);
  // The lane still works, and Done was not called for refused batches.
  item = Item(owned);
  ASSERT_TRUE(lane->Submit({&item, 1}, waiter_.MakeDone()).ok());
  EXPECT_TRUE(waiter_.Wait().statuses[0].ok());
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  EXPECT_EQ(waiter_.calls(), 1);
}

// Gaps of an output come back as zeros (or poison), not as another request's data.
TEST_F(CudaBackendTest, OutputGapsContainNoOtherData) {
  std::unique_ptr<Lane> lane = MakeLane();
  ProblemSpec spec = MakeSpec(1, 2, 1, 30, 40, 64, 64);
  spec.layout = Layout::kStrided;
  for (const bool poison : {false, true}) {
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    WorkItem item = Item(owned);
    item.poison_output = poison;
    ASSERT_TRUE(lane->Submit({&item, 1}, waiter_.MakeDone()).ok());
    ASSERT_TRUE(waiter_.Wait().statuses[0].ok());
    EXPECT_TRUE(CheckAllRows(owned.attention).ok);
    const auto* gap = static_cast<const unsigned char*>(owned.O(0, 0, 0, 63)) + 4;
    EXPECT_EQ(*gap, poison ? 0xff : 0);
  }
}

TEST_F(CudaBackendTest, ALaneMayBeDestroyedWhileItsBatchRuns) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 4, 4, 1000, 4000, 128, 128), FreshSeed());
  const WorkItem item = Item(owned);
  for (int n = 0; n < 10; ++n) {
    std::unique_ptr<Lane> lane = MakeLane();
    ASSERT_TRUE(lane->Submit({&item, 1}, waiter_.MakeDone()).ok());
    lane.reset();
    EXPECT_TRUE(waiter_.Wait().statuses[0].ok());
  }
  EXPECT_EQ(waiter_.calls(), 10);
}

TEST_F(CudaBackendTest, HostBlocksAreAlignedAndRefusedWhenAbsurd) {
  HostAllocator& allocator = backend_->host_allocator();
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{100000}}) {
    const Result<void*> block = allocator.Allocate(bytes);
    ASSERT_TRUE(block.ok()) << block.status().ToString();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*block) % 256, 0u);
    std::memset(*block, 1, static_cast<size_t>(bytes));
    allocator.Free(*block, bytes);
  }
  const Result<void*> absurd = allocator.Allocate(int64_t{1} << 50);
  ASSERT_FALSE(absurd.ok());
  EXPECT_EQ(absurd.status().code(), Code::kResourceExhausted) << absurd.status().ToString();
  // A refusal leaves no error behind that the next launch would report.
  std::unique_ptr<Lane> lane = MakeLane();
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 8, 8, 32, 32), FreshSeed());
  const WorkItem item = Item(owned);
  ASSERT_TRUE(lane->Submit({&item, 1}, waiter_.MakeDone()).ok());
  EXPECT_TRUE(waiter_.Wait().statuses[0].ok());
}

}  // namespace
}  // namespace attend::test
