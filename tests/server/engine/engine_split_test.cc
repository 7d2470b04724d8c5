// SPDX-License-Identifier: Apache-2.0
//
// Requests split over several devices inside the engine: one answer, one status, one end.

#include <algorithm>
#include <chrono>
#include <string>

#include "tests/server/support/engine_fixture.h"
#include "tests/server/support/split_specs.h"

namespace attend {
namespace {

class SplitTest : public EngineTest {
 protected:
  SplitTest() { options_.split_flops_min = 1e5; }

  // 8 sequences or heads for up to four devices, above the threshold: 8 * 4 * 64 * 64 * 16 * 2.
  static test::ProblemSpec Large() { return test::MakeSpec(2, 4, 4, 64, 64, 16, 16); }
  // As over shared memory: each tensor in memory of its own.
  std::unique_ptr<Request> NewScattered(const test::ProblemSpec& spec) {
    auto request = NewRequest(spec);
    scattered_.push_back(test::Scatter(*memory_.back()));
    request->attention = scattered_.back().attention;
    request->input_spans = scattered_.back().spans;
    return request;
  }
  static test::ProblemSpec Small() { return test::MakeSpec(1, 1, 1, 16, 16, 8, 8); }

  std::vector<test::ScatteredInputs> scattered_;

  void HoldAll() {
    for (test::FakeBackend* device : devices_) device->Hold();
  }
  void ReleaseAll() {
    for (test::FakeBackend* device : devices_) device->Release();
  }
  void ExpectIdle() {
    EXPECT_TRUE(engine_->WaitIdle(kNever));
    EXPECT_EQ(engine_->inflight(), 0);
    EXPECT_EQ(engine_->host_pool().used_bytes(), 0);
    for (const auto& device : engine_->Devices()) {
      EXPECT_EQ(device.outstanding_batches, 0) << device.info.name;
    }
  }
};

TEST_F(SplitTest, TheAnswerIsTheWholes) {
  StartGpus(4);
  auto request = NewRequest(Large());
  request->check = AnswerCheck::kAsked;
  const Request& ended = collector_.WaitFor(MustSubmit(std::move(request)));
  ASSERT_TRUE(ended.status.ok()) << ended.status.ToString();
  EXPECT_TRUE(CheckAllRows(ended.attention).ok);
  EXPECT_TRUE(memory_.front()->GuardsIntact());
  ASSERT_TRUE(ended.report.has_value()) << "the whole is checked, once";
  EXPECT_TRUE(ended.report->ok);
  EXPECT_EQ(ended.report->rows_total, 2 * 4 * 64);
  EXPECT_EQ(ended.device_name, "cuda:0+cuda:1+cuda:2+cuda:3");
  EXPECT_EQ(KernelName(ended.selection.kernel), "cuda_flash_fp32");
  ASSERT_EQ(ended.device_flops.size(), 4u);
  for (const auto& each : ended.device_flops) EXPECT_EQ(each.flops, ended.flops / 4);
  EXPECT_LE(ended.enqueued, ended.started);
  EXPECT_LE(ended.started, ended.completed);
  for (const test::FakeBackend* device : devices_) EXPECT_EQ(device->submitted_items(), 1);
  ExpectIdle();
}

TEST_F(SplitTest, EveryFeatureInEveryLayout) {
  options_.worker.queue_requests_max = 1000;
  options_.worker.lanes = 2;
  options_.split_flops_min = 100;
  options_.memory_budget_bytes = int64_t{1} << 26;
  StartGpus(3);
  constexpr int kRequests = 200;
  for (int i = 0; i < kRequests; ++i) {
    const test::ProblemSpec spec = test::SplittableSpec(seed_ + i, 2e4);
    MustSubmit(i % 2 == 0 ? NewRequest(spec) : NewScattered(spec));
  }
  int split = 0;
  for (uint64_t id = 1; id <= kRequests; ++id) {
    const Request& request = collector_.WaitFor(id);
    ASSERT_TRUE(request.status.ok()) << request.status.ToString() << " seed " << seed_;
    const RowsReport report = CheckAllRows(request.attention);
    EXPECT_TRUE(report.ok) << report.detail << " seed " << seed_;
    EXPECT_TRUE(memory_[id - 1]->GuardsIntact()) << "seed " << seed_;
    split += request.device_flops.size() > 1;
  }
  EXPECT_GT(split, kRequests / 5);
  ExpectIdle();
}

// Rows of one head, and of all heads with LSE, whose parts are no run of memory.
TEST_F(SplitTest, RowsOverDevices) {
  StartGpus(2);
  test::ProblemSpec one_head = test::MakeSpec(1, 1, 1, 1600, 1600, 1, 1);
  one_head.problem.mask.right = 0;
  test::ProblemSpec blhd = test::MakeSpec(1, 3, 1, 1030, 200, 2, 2);
  blhd.layout = test::Layout::kBLHD;
  for (const test::ProblemSpec& spec : {one_head, blhd}) {
    const Request& ended = collector_.WaitFor(MustSubmit(NewRequest(spec)));
    ASSERT_TRUE(ended.status.ok()) << ended.status.ToString();
    EXPECT_EQ(ended.device_name, "cuda:0+cuda:1");
    EXPECT_TRUE(CheckAllRows(ended.attention).ok);
    EXPECT_TRUE(memory_.back()->GuardsIntact());
  }
  ExpectIdle();
}

// A part reads its own piece of each of the whole's spans.
TEST_F(SplitTest, TensorsInMemoryOfTheirOwn) {
  StartGpus(2);
  test::ProblemSpec all = test::MakeSpec(2, 4, 2, 60, 70, 16, 24);
  all.problem.has_bias = true;
  all.problem.has_alibi = true;
  all.problem.has_sinks = true;
  all.problem.return_lse = true;
  test::ProblemSpec rows = test::MakeSpec(1, 1, 1, 1600, 1600, 1, 1);
  rows.problem.mask.right = 0;
  for (const test::ProblemSpec& spec : {Large(), all, rows}) {
    auto request = NewScattered(spec);
    EXPECT_GE(request->input_spans.size(), 3);
    const Request& ended = collector_.WaitFor(MustSubmit(std::move(request)));
    ASSERT_TRUE(ended.status.ok()) << ended.status.ToString();
    EXPECT_EQ(ended.device_name, "cuda:0+cuda:1");
    EXPECT_TRUE(CheckAllRows(ended.attention).ok) << "seed " << seed_;
    EXPECT_TRUE(memory_.back()->GuardsIntact());
  }
  ExpectIdle();
}

TEST_F(SplitTest, SmallOnesAndOtherKindsStayWhole) {
  StartGpus(2);
  EXPECT_EQ(collector_.WaitFor(MustSubmit(NewRequest(Small()))).device_name, "cuda:0");
  engine_.reset();
  devices_.clear();
  Metrics metrics("test");
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<test::FakeBackend>("cpu"));
  backends.push_back(std::make_unique<test::FakeBackend>("cuda:0", DeviceKind::kCuda));
  Result<std::unique_ptr<Engine>> engine =
      Engine::Make(std::move(backends), options_, metrics, clock_);
  ASSERT_TRUE(engine.ok());
  engine_ = std::move(*engine);
  const Request& ended = collector_.WaitFor(MustSubmit(NewRequest(Large())));
  EXPECT_EQ(ended.device_name, "cuda:0") << "the faster of two kinds";
  engine_.reset();
}

TEST_F(SplitTest, OffIsOff) {
  options_.split_flops_min = 0;
  StartGpus(2);
  EXPECT_EQ(collector_.WaitFor(MustSubmit(NewRequest(Large()))).device_name, "cuda:0");
}

TEST_F(SplitTest, CancelDropsAllPartsThatAreQueued) {
  StartGpus(2);
  HoldAll();
  for (int i = 0; i < 2; ++i) MustSubmit(NewRequest(Small()));
  for (test::FakeBackend* device : devices_) device->WaitForWaiting(1);
  const uint64_t id = MustSubmit(NewRequest(Large()));
  engine_->Cancel(id);
  EXPECT_EQ(collector_.WaitFor(id).status.code(), Code::kCancelled);
  engine_->Cancel(id);
  ReleaseAll();
  ExpectIdle();
  for (const test::FakeBackend* device : devices_) EXPECT_EQ(device->submitted_items(), 1);
}

TEST_F(SplitTest, ACancelledPartWaitsForTheOneThatRuns) {
  StartGpus(2);
  HoldAll();
  MustSubmit(NewRequest(Small()));  // on the first device
  devices_[0]->WaitForWaiting(1);
  const uint64_t id = MustSubmit(NewRequest(Large()));
  devices_[1]->WaitForWaiting(1);  // the second half runs, the first is queued
  engine_->Cancel(id);
  EXPECT_FALSE(collector_.Ended(id)) << "its memory is still written";
  devices_[1]->Release();
  EXPECT_EQ(collector_.WaitFor(id).status.code(), Code::kCancelled);
  devices_[0]->Release();
  ExpectIdle();
}

TEST_F(SplitTest, WhatRunsRunsOn) {
  StartGpus(2);
  HoldAll();
  const uint64_t id = MustSubmit(NewRequest(Large()));
  for (test::FakeBackend* device : devices_) device->WaitForWaiting(1);
  engine_->Cancel(id);
  ReleaseAll();
  EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  ExpectIdle();
}

TEST_F(SplitTest, ADeadlineInTheQueueEndsIt) {
  StartGpus(2);
  HoldAll();
  for (int i = 0; i < 2; ++i) MustSubmit(NewRequest(Small()));
  for (test::FakeBackend* device : devices_) device->WaitForWaiting(1);
  auto request = NewRequest(Large());
  request->deadline = clock_.Now() + std::chrono::milliseconds(5);
  const uint64_t id = MustSubmit(std::move(request));
  EXPECT_EQ(collector_.WaitFor(id).status.code(), Code::kDeadlineExceeded);
  ReleaseAll();
  ExpectIdle();
}

TEST_F(SplitTest, OneFailedPartFailsTheWholeOnce) {
  StartGpus(3);
  for (size_t faulty = 0; faulty < devices_.size(); ++faulty) {
    devices_[faulty]->FailItem(1, Internal("planted fault"));
    const Request& failed = collector_.WaitFor(MustSubmit(NewRequest(Large())));
    EXPECT_EQ(failed.status.code(), Code::kInternal);
    EXPECT_EQ(failed.status.message(), "planted fault");
    EXPECT_TRUE(collector_.WaitFor(MustSubmit(NewRequest(Large()))).status.ok());
  }
  ExpectIdle();
}

// A part that its device has no room for goes to another one that is alike, cut as it was.
TEST_F(SplitTest, AFullQueueOfOneDevicePassesItsPartsOn) {
  options_.worker.queue_requests_max = 2;
  StartGpus(2);
  HoldAll();
  // The first device has one request that runs and two that wait.
  for (int i = 0; i < 2; ++i) MustSubmit(NewRequest(Small()));
  for (test::FakeBackend* device : devices_) device->WaitForWaiting(1);
  for (int i = 0; i < 3; ++i) MustSubmit(NewRequest(Small()));
  devices_[1]->ReleaseOne();
  devices_[1]->WaitForBatches(2);
  devices_[1]->WaitForWaiting(1);  // and the second one that runs
  const uint64_t id = MustSubmit(NewRequest(Large()));
  EXPECT_EQ(Submit(NewRequest(Large())).code(), Code::kResourceExhausted) << "now nobody has room";
  EXPECT_EQ(Submit(NewRequest(Small())).code(), Code::kResourceExhausted);
  ReleaseAll();
  const Request& ended = collector_.WaitFor(id);
  ASSERT_TRUE(ended.status.ok()) << ended.status.ToString();
  EXPECT_TRUE(CheckAllRows(ended.attention).ok);
  EXPECT_EQ(ended.device_name, "cuda:1") << "both halves";
  ASSERT_EQ(ended.device_flops.size(), 1u);
  EXPECT_EQ(ended.device_flops.front().flops, ended.flops);
  ExpectIdle();
  // As in the place of its own.
  const Request& again = collector_.WaitFor(MustSubmit(NewRequest(Large())));
  EXPECT_EQ(again.device_name, "cuda:0+cuda:1");
}

// Devices of another kind take what those that are alike have no room for: whole.
TEST_F(SplitTest, AFullGroupPassesTheWholeOn) {
  options_.worker.queue_requests_max = 1;
  std::vector<std::unique_ptr<test::FakeBackend>> backends;
  for (const char* name : {"cuda:0", "cuda:1"}) {
    backends.push_back(std::make_unique<test::FakeBackend>(name, DeviceKind::kCuda));
    backends.back()->MoveSpans();
  }
  backends.push_back(std::make_unique<test::FakeBackend>("cpu"));
  StartOn(std::move(backends));
  HoldAll();
  std::vector<uint64_t> ids;
  for (int i = 0; i < 2; ++i) {
    ids.push_back(MustSubmit(NewRequest(Large())));
    for (int gpu = 0; gpu < 2; ++gpu) devices_[static_cast<size_t>(gpu)]->WaitForWaiting(1);
  }
  const uint64_t passed_on = MustSubmit(NewRequest(Large()));
  devices_[2]->WaitForWaiting(1);
  ids.push_back(MustSubmit(NewRequest(Large())));  // waits there
  EXPECT_EQ(Submit(NewRequest(Large())).code(), Code::kResourceExhausted);
  ReleaseAll();
  EXPECT_EQ(collector_.WaitFor(passed_on).device_name, "cpu");
  for (const uint64_t id : ids) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  ExpectIdle();
}

TEST_F(SplitTest, ALaterRefusalTakesBackWhatIsQueued) {
  options_.worker.queue_requests_max = 1;
  options_.worker.batcher.batch_flops_max = 1e5;
  StartGpus(2);
  HoldAll();
  for (int i = 0; i < 3; ++i) {
    // Device 0 gets the larger one, so that the third goes to device 1: one place is left, which
    // the first part takes.
    MustSubmit(NewRequest(i == 0 ? test::MakeSpec(1, 1, 1, 32, 32, 8, 8) : Small()));
    if (i < 2) devices_[static_cast<size_t>(i)]->WaitForWaiting(1);
  }
  const uint64_t id = MustSubmit(NewRequest(Large()));
  const Request& ended = collector_.WaitFor(id);
  EXPECT_EQ(ended.status.code(), Code::kResourceExhausted) << "of the second part";
  EXPECT_EQ(devices_[0]->waiting_batches(), 1) << "and the first never ran";
  ReleaseAll();
  ExpectIdle();
  EXPECT_EQ(devices_[0]->submitted_items(), 1);
}

TEST_F(SplitTest, DrainFinishesSplitRequests) {
  StartGpus(2);
  HoldAll();
  const uint64_t running = MustSubmit(NewRequest(Large()));
  const uint64_t queued = MustSubmit(NewRequest(Large()));
  engine_->Drain();
  EXPECT_FALSE(engine_->WaitIdle(clock_.Now() + std::chrono::milliseconds(3)));
  EXPECT_EQ(Submit(NewRequest(Large())).code(), Code::kUnavailable);
  ReleaseAll();
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
  EXPECT_TRUE(collector_.WaitFor(queued).status.ok());
}

TEST_F(SplitTest, StopEndsWhatIsQueued) {
  StartGpus(2);
  HoldAll();
  const uint64_t running = MustSubmit(NewRequest(Large()));
  for (test::FakeBackend* device : devices_) device->WaitForWaiting(1);
  const uint64_t queued = MustSubmit(NewRequest(Large()));
  std::thread release([&] {
    collector_.WaitFor(queued);
    ReleaseAll();
  });
  engine_->Stop();
  release.join();
  EXPECT_EQ(collector_.WaitFor(queued).status.code(), Code::kUnavailable);
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
}

TEST_F(SplitTest, ALostDeviceFailsTheWhole) {
  StartGpus(3);
  HoldAll();
  const uint64_t running = MustSubmit(NewRequest(Large()));
  for (test::FakeBackend* device : devices_) device->WaitForWaiting(1);
  const uint64_t queued = MustSubmit(NewRequest(Large()));
  devices_[1]->LoseDevice();
  devices_[1]->Release();
  EXPECT_EQ(collector_.WaitFor(queued).status.code(), Code::kUnavailable);
  EXPECT_FALSE(collector_.Ended(running)) << "the others still write its memory";
  ReleaseAll();
  EXPECT_EQ(collector_.WaitFor(running).status.code(), Code::kUnavailable);
  ExpectIdle();
  // New ones are split over those that are left.
  const Request& later = collector_.WaitFor(MustSubmit(NewRequest(Large())));
  ASSERT_TRUE(later.status.ok());
  EXPECT_EQ(later.device_name, "cuda:0+cuda:2");
  EXPECT_TRUE(CheckAllRows(later.attention).ok);
}

}  // namespace
}  // namespace attend
