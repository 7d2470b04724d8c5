// SPDX-License-Identifier: Apache-2.0
//
// Work on the CPU ends soon after its stop flag is set, wherever it is. Each case is hours of work
// in little memory: all its keys are the same one (stride 0). Code that did not check the flag
// would hang, so no time is measured.

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "kernels/contract/limits.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

struct Endless {
  const char* name;
  KernelId kernel;
  int64_t heads;
  int64_t rows;
  int64_t dim;
};

// Waits until the process has computed for a while; nothing else runs in it.
void WaitUntilComputing() {
  const std::clock_t begin = std::clock();
  while (std::clock() - begin < CLOCKS_PER_SEC / 50) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

OwnedAttention MakeEndless(const Endless& endless, uint64_t seed) {
  OwnedAttention owned = MakeAttention(
      MakeSpec(1, endless.heads, endless.heads, endless.rows, 1, endless.dim, endless.dim), seed);
  owned.attention.problem.len_k = kLengthMax;
  owned.attention.k.stride_l = owned.attention.v.stride_l = 0;
  return owned;
}

class CpuStopTest : public ::testing::TestWithParam<Endless> {
 protected:
  const uint64_t seed_ = FreshSeed();
};

TEST_P(CpuStopTest, AStoppedItemEndsAndItsBatchIsUnaffected) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend(BackendOptions{.cpu_threads = 2});
  const std::unique_ptr<Lane> lane = std::move(backend->MakeLane(LaneOptions())).value();
  OwnedAttention endless = MakeEndless(GetParam(), seed_);
  const auto make = [this] { return MakeAttention(MakeSpec(1, 2, 1, 70, 90, 16, 24), seed_); };
  OwnedAttention company = make();
  OwnedAttention alone = make();
  const Selection flash{KernelId::kCpuFlash, "test", 0};
  StopFlag stop;
  WorkItem items[] = {endless.Item({GetParam().kernel, "test", 0}), company.Item(flash)};
  items[0].stop = &stop;
  std::promise<BatchOutcome> promise;
  ASSERT_TRUE(
      lane->Submit(items, [&](BatchOutcome outcome) { promise.set_value(std::move(outcome)); })
          .ok());
  WaitUntilComputing();
  stop.Set();
  const BatchOutcome outcome = promise.get_future().get();
  EXPECT_EQ(outcome.statuses[0].code(), Code::kCancelled);
  EXPECT_TRUE(outcome.statuses[1].ok());

  const WorkItem again[] = {alone.Item(flash)};
  std::promise<void> done;
  ASSERT_TRUE(lane->Submit(again, [&](BatchOutcome) { done.set_value(); }).ok());
  done.get_future().wait();
  EXPECT_EQ(company.OutputBytes(), alone.OutputBytes()) << "seed " << seed_;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CpuStopTest,
    ::testing::Values(Endless{"OneTile", KernelId::kCpuFlash, 1, 30, 256},
                      Endless{"OneDecodedRow", KernelId::kCpuFlash, 1, 1, 256},
                      Endless{"ManyTiles", KernelId::kCpuFlash, 4, 5000, 8},
                      Endless{"OneReferenceRow", KernelId::kCpuReference, 1, 1, 256},
                      Endless{"ManyReferenceRows", KernelId::kCpuReference, 3, 100, 1}),
    [](const auto& info) { return info.param.name; });

TEST(StoppedCheck, EndsInTheMiddleOfARow) {
  const OwnedAttention endless = MakeEndless({"", KernelId::kCpuFlash, 1, 1, 256}, FreshSeed());
  StopFlag stop;
  std::thread checker([&] {
    const RowId row;
    static_cast<void>(CheckRows(endless.attention, {&row, 1}, &stop));
  });
  WaitUntilComputing();
  stop.Set();
  checker.join();
  std::thread sampler([&] { static_cast<void>(SampleRows(endless.attention, 1, 1e30, &stop)); });
  sampler.join();
}

}  // namespace
}  // namespace attend::test
