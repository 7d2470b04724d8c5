// SPDX-License-Identifier: Apache-2.0
//
// The CPU as a Backend: lanes, the order of their events, statuses, memory.

#include "kernels/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <thread>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"
#include "tests/kernels/support/tile_twin.h"

namespace attend::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);  // far beyond any run; only a hang reaches it

Selection Kernel(KernelId id) { return Selection{id, "test", 0}; }

BatchOutcome RunBatch(Lane* lane, std::span<const WorkItem> items) {
  std::promise<BatchOutcome> promise;
  const Status status =
      lane->Submit(items, [&](BatchOutcome outcome) { promise.set_value(std::move(outcome)); });
  EXPECT_TRUE(status.ok()) << status.ToString();
  std::future<BatchOutcome> future = promise.get_future();
  if (future.wait_for(kPatience) != std::future_status::ready) {
    ADD_FAILURE() << "Done was not called";
    std::abort();  // the promise must outlive the lane
  }
  return future.get();
}

class CpuBackendTest : public testing::Test {
 protected:
  std::unique_ptr<Lane> MakeLane() {
    Result<std::unique_ptr<Lane>> lane = backend_->MakeLane(LaneOptions());
    EXPECT_TRUE(lane.ok());
    return std::move(lane).value();
  }

  const uint64_t seed_ = FreshSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    "ATTEND_TEST_SEED=" + std::to_string(seed_)};
  std::unique_ptr<Backend> backend_ = MakeCpuBackend(BackendOptions{.cpu_threads = 2});
};

TEST_F(CpuBackendTest, ReportsItsInfo) {
  const DeviceInfo& info = backend_->info();
  EXPECT_EQ(info.kind, DeviceKind::kCpu);
  EXPECT_EQ(info.name, "cpu");
  EXPECT_EQ(info.units, 2);
  EXPECT_NE(info.description.find(CpuFlashTarget()), std::string::npos) << info.description;
  EXPECT_NE(info.description.find("2 threads"), std::string::npos) << info.description;
  EXPECT_EQ(info.not_amx, cpu_flash::WhyNoAmx());
  EXPECT_NE(info.description.find(cpu_flash::AmxText()), std::string::npos) << info.description;
  EXPECT_GT(info.memory_bytes, int64_t{1} << 20);
  EXPECT_EQ(MakeCpuBackend(BackendOptions())->info().units,
            static_cast<int>(std::thread::hardware_concurrency()));
  const Result<std::unique_ptr<Backend>> by_name = MakeBackend("cpu", BackendOptions());
  ASSERT_TRUE(by_name.ok());
  EXPECT_EQ((*by_name)->info().name, "cpu");
}

TEST_F(CpuBackendTest, RunsBothKernelsInOneBatch) {
  const std::unique_ptr<Lane> lane = MakeLane();
  std::vector<OwnedAttention> all;
  std::vector<WorkItem> items;
  for (uint64_t n = 0; n < 12; ++n) {
    all.push_back(MakeAttention(RandomKernelSpec(seed_ + n), seed_ + n));
    items.push_back(
        all.back().Item(Kernel(n % 3 == 0 ? KernelId::kCpuReference : KernelId::kCpuFlash)));
  }
  const BatchOutcome outcome = RunBatch(lane.get(), items);
  ASSERT_EQ(outcome.statuses.size(), items.size());
  EXPECT_GT(outcome.kernel_ns, 0);
  EXPECT_EQ(outcome.copy_in_ns, 0);
  EXPECT_EQ(outcome.copy_out_ns, 0);
  EXPECT_EQ(outcome.span_ns, outcome.kernel_ns);
  EXPECT_FALSE(outcome.device_lost);
  for (size_t n = 0; n < all.size(); ++n) {
    EXPECT_TRUE(outcome.statuses[n].ok());
    const RowsReport report = CheckAllRows(all[n].attention);
    EXPECT_TRUE(report.ok) << report.detail;
    EXPECT_TRUE(all[n].GuardsIntact());
  }
}

// In any order, each with its own kernel's bits.
TEST_F(CpuBackendTest, TilesRunAmongOthers) {
  if (cpu_flash::ChooseAmxTileFunction() == nullptr || !cpu_flash::HasBf16Pairs()) {
    GTEST_SKIP() << "no AVX-512 with AVX512_BF16";
  }
  const WithTwinTiles twin;
  const std::unique_ptr<Lane> lane = MakeLane();
  std::vector<OwnedAttention> all;
  std::vector<WorkItem> items;
  std::vector<std::vector<std::byte>> alone;
  for (uint64_t n = 0; n < 8; ++n) {
    const bool amx = n % 3 != 1;
    all.push_back(MakeAttention(MakeSpec(1, 2, 1, 40, 90, 40, 24, DType::kBFloat16), seed_ + n));
    const Attention* batch[] = {&all.back().attention};
    CpuFlash(batch, {}, amx ? 0 : 1);
    alone.push_back(all.back().OutputBytes());
    CpuFlash(batch, {}, amx ? 1 : 0);
    EXPECT_NE(all.back().OutputBytes(), alone.back()) << "the kernels round differently";
    all.back().ResetOutput();
    items.push_back(all.back().Item(Kernel(amx ? KernelId::kCpuFlashAmx : KernelId::kCpuFlash)));
  }
  const BatchOutcome outcome = RunBatch(lane.get(), items);
  for (size_t n = 0; n < all.size(); ++n) {
    EXPECT_TRUE(outcome.statuses[n].ok());
    EXPECT_EQ(all[n].OutputBytes(), alone[n]) << n;
  }
}

TEST_F(CpuBackendTest, BackwardPassesRunBesideForwardPasses) {
  const std::unique_ptr<Lane> lane = MakeLane();
  std::vector<std::unique_ptr<OwnedAttention>> all;
  std::vector<std::unique_ptr<OwnedGradients>> gradients;
  std::vector<WorkItem> items;
  for (uint64_t n = 0; n < 12; ++n) {
    ProblemSpec spec = RandomSpec(seed_ + n, 1e5);
    spec.problem.return_lse = true;
    all.push_back(std::make_unique<OwnedAttention>(MakeAttention(spec, seed_ + n)));
    WorkItem item =
        all.back()->Item(Kernel(n % 4 == 0 ? KernelId::kCpuReference : KernelId::kCpuFlash));
    if (n % 2 == 0) {
      CpuReference(all.back()->attention);
      gradients.push_back(std::make_unique<OwnedGradients>(all.back()->attention, n));
      item.gradients = gradients.back()->get();
      item.inputs = {all.back()->input, all.back()->output};
      item.outputs = {};
    }
    items.push_back(item);
  }
  const BatchOutcome outcome = RunBatch(lane.get(), items);
  for (size_t n = 0; n < all.size(); ++n) {
    ASSERT_TRUE(outcome.statuses[n].ok()) << outcome.statuses[n].ToString();
    const Attention& a = all[n]->attention;
    EXPECT_TRUE(CheckAllRows(a).ok) << "O and LSE are only read";
    if (n % 2 != 0) continue;
    const OwnedGradients& own = *gradients[n / 2];
    EXPECT_EQ(GradientsJudge(a, own.get()).Fault(own.get()), "");
    EXPECT_TRUE(own.GuardsIntact());
  }
}

TEST_F(CpuBackendTest, APoisonedBackwardPassWritesEveryRequestedGradient) {
  const std::unique_ptr<Lane> lane = MakeLane();
  ProblemSpec spec = MakeSpec(1, 2, 1, 20, 30, 16, 16);
  spec.problem.return_lse = true;
  OwnedAttention owned = MakeAttention(spec, seed_);
  CpuReference(owned.attention);
  OwnedGradients gradients(owned.attention, seed_);
  std::vector<float> d_q(2 * 20 * 16, 1.0f);
  WorkItem item = owned.Item(Kernel(KernelId::kCpuFlash));
  Gradients& only = item.gradients.emplace();
  only.d_o = gradients.get().d_o;
  only.d_q = {d_q.data(), 0, 20 * 16, 16};
  item.outputs = {{d_q.data(), std::ssize(d_q) * 4}};
  item.poison_output = true;
  ASSERT_TRUE(RunBatch(lane.get(), {&item, 1}).statuses[0].ok());
  for (const float each : d_q) EXPECT_TRUE(std::isfinite(each));
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  // Stopped before it begins: the outputs hold the poison, or their previous contents.
  StopFlag stop;
  stop.Set();
  item.stop = &stop;
  EXPECT_EQ(RunBatch(lane.get(), {&item, 1}).statuses[0].code(), Code::kCancelled);
}

TEST_F(CpuBackendTest, ReferenceOnALaneHasTheBitsOfThePlainCall) {
  OwnedAttention on_lane = MakeAttention(MakeSpec(2, 4, 2, 40, 50, 32, 32), seed_);
  OwnedAttention plain = MakeAttention(MakeSpec(2, 4, 2, 40, 50, 32, 32), seed_);
  CpuReference(plain.attention);
  const std::unique_ptr<Lane> lane = MakeLane();
  const WorkItem items[] = {on_lane.Item(Kernel(KernelId::kCpuReference))};
  EXPECT_TRUE(RunBatch(lane.get(), items).statuses[0].ok());
  EXPECT_EQ(on_lane.OutputBytes(), plain.OutputBytes());
}

TEST_F(CpuBackendTest, AnItemForAnotherDeviceFailsAlone) {
  const std::unique_ptr<Lane> lane = MakeLane();
  OwnedAttention good = MakeAttention(MakeSpec(1, 1, 1, 16, 16, 64, 64), seed_);
  OwnedAttention bad = MakeAttention(MakeSpec(1, 1, 1, 16, 16, 64, 64), seed_);
  const WorkItem items[] = {bad.Item(Kernel(KernelId::kCudaNaive)),
                            good.Item(Kernel(KernelId::kCpuFlash))};
  const std::vector<std::byte> untouched = bad.OutputBytes();
  const BatchOutcome outcome = RunBatch(lane.get(), items);
  EXPECT_EQ(outcome.statuses[0].code(), Code::kInternal);
  EXPECT_NE(outcome.statuses[0].message().find("cuda_naive"), std::string::npos);
  EXPECT_TRUE(outcome.statuses[1].ok());
  EXPECT_EQ(bad.OutputBytes(), untouched);
  EXPECT_TRUE(CheckAllRows(good.attention).ok);
}

TEST_F(CpuBackendTest, AnEmptyBatchIsReportedDone) {
  const std::unique_ptr<Lane> lane = MakeLane();
  EXPECT_TRUE(RunBatch(lane.get(), {}).statuses.empty());
}

TEST_F(CpuBackendTest, ASecondSubmitIsRefusedUntilDone) {
  const std::unique_ptr<Lane> lane = MakeLane();
  OwnedAttention owned = MakeAttention(MakeSpec(1, 8, 8, 700, 700, 64, 64), seed_);
  const WorkItem items[] = {owned.Item(Kernel(KernelId::kCpuFlash))};
  std::atomic<int> calls{0};
  int accepted = 0;
  int refused = 0;
  // A batch of milliseconds is almost always still running when the second one comes. If this
  // thread was delayed for longer, the second is rightly accepted, and the test tries again.
  for (int n = 0; n < 100 && refused == 0; ++n) {
    std::promise<void> first, second;
    ASSERT_TRUE(lane->Submit(items,
                             [&](BatchOutcome) {
                               ++calls;
                               first.set_value();
                             })
                    .ok());
    const Status status = lane->Submit(items, [&](BatchOutcome) {
      ++calls;
      second.set_value();
    });
    accepted += status.ok() ? 2 : 1;
    ASSERT_EQ(first.get_future().wait_for(kPatience), std::future_status::ready);
    if (status.ok()) {
      ASSERT_EQ(second.get_future().wait_for(kPatience), std::future_status::ready);
    } else {
      EXPECT_EQ(status.code(), Code::kFailedPrecondition);
      ++refused;
    }
  }
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(calls.load(), accepted);
  EXPECT_TRUE(RunBatch(lane.get(), items).statuses[0].ok());  // free again
}

TEST_F(CpuBackendTest, DoneMaySubmitTheNextBatch) {
  const std::unique_ptr<Lane> lane = MakeLane();
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 16, 16, 64, 64), seed_);
  const WorkItem items[] = {owned.Item(Kernel(KernelId::kCpuFlash))};
  std::promise<void> finished;
  int left = 1000;
  std::function<void(BatchOutcome)> again = [&](BatchOutcome outcome) {
    EXPECT_TRUE(outcome.statuses[0].ok());
    if (--left == 0) return finished.set_value();
    EXPECT_TRUE(lane->Submit(items, again).ok());
  };
  ASSERT_TRUE(lane->Submit(items, again).ok());
  ASSERT_EQ(finished.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(left, 0);
}

TEST_F(CpuBackendTest, LanesRunConcurrentlyAndDoneIsCalledOncePerBatch) {
  constexpr int kLanes = 4;
  const int batches = static_cast<int>(20 + 60 * TestScale());
  std::vector<std::thread> submitters;
  std::atomic<int> done{0};
  std::atomic<int> wrong{0};
  for (int t = 0; t < kLanes; ++t) {
    submitters.emplace_back([&, t] {
      const std::unique_ptr<Lane> lane = MakeLane();
      for (int n = 0; n < batches; ++n) {
        const uint64_t seed = seed_ + static_cast<uint64_t>(t * batches + n);
        std::vector<OwnedAttention> all;
        std::vector<WorkItem> items;
        for (uint64_t k = 0; k < seed % 4; ++k) {
          all.push_back(MakeAttention(RandomKernelSpec(seed + k, 5e5), seed + k));
          items.push_back(all.back().Item(Kernel(KernelId::kCpuFlash)));
        }
        const BatchOutcome outcome = RunBatch(lane.get(), items);
        ++done;
        for (size_t k = 0; k < all.size(); ++k) {
          if (!outcome.statuses[k].ok() || !CheckAllRows(all[k].attention).ok) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : submitters) thread.join();
  EXPECT_EQ(done.load(), kLanes * batches);
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(CpuBackendTest, DestroyingALaneFinishesAcceptedBatches) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 4, 4, 300, 300, 64, 64), seed_);
  const WorkItem items[] = {owned.Item(Kernel(KernelId::kCpuFlash))};
  std::atomic<bool> done{false};
  {
    const std::unique_ptr<Lane> lane = MakeLane();
    ASSERT_TRUE(lane->Submit(items, [&](BatchOutcome) { done = true; }).ok());
  }
  EXPECT_TRUE(done.load());
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
}

TEST_F(CpuBackendTest, ItemsAreCopiedAtSubmit) {
  const std::unique_ptr<Lane> lane = MakeLane();
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 16, 16, 64, 64), seed_);
  std::promise<BatchOutcome> promise;
  {
    std::vector<WorkItem> items = {owned.Item(Kernel(KernelId::kCpuFlash))};
    ASSERT_TRUE(lane->Submit(items, [&](BatchOutcome o) { promise.set_value(std::move(o)); }).ok());
    items[0] = WorkItem();
  }
  EXPECT_TRUE(promise.get_future().get().statuses[0].ok());
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
}

TEST_F(CpuBackendTest, HostMemoryIsAlignedAndRefusedWithAStatus) {
  HostAllocator& allocator = backend_->host_allocator();
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{4097},
                              (int64_t{2} << 20) - 1, int64_t{5} << 20}) {
    const Result<void*> block = allocator.Allocate(bytes);
    ASSERT_TRUE(block.ok()) << bytes;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*block) % 256, 0u);
    std::memset(*block, 1, static_cast<size_t>(bytes));
    allocator.Free(*block, bytes);
  }
  EXPECT_EQ(allocator.Allocate(-1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(allocator.Allocate(int64_t{1} << 60).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(allocator.Allocate(INT64_MAX).status().code(), Code::kResourceExhausted);
}

}  // namespace
}  // namespace attend::test
