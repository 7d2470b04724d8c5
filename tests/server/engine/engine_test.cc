// SPDX-License-Identifier: Apache-2.0
//
// Every request ends exactly once, refusals change nothing, and faults reach only the requests
// concerned.

#include <chrono>

#include "tests/server/support/engine_fixture.h"

namespace attend {
namespace {

using test::FakeBackend;

TEST_F(EngineTest, AnswersAreRightAndRequestsEndOnce) {
  options_.worker.lanes = 3;
  options_.worker.queue_requests_max = 1000;
  options_.worker.batcher.batch_requests_max = 8;
  Start();
  for (int i = 0; i < 100; ++i) MustSubmit(NewRequest(test::RandomSpec(seed_ + i, 2e4)));
  for (uint64_t id = 1; id <= 100; ++id) {
    const Request& request = collector_.WaitFor(id);
    ASSERT_TRUE(request.status.ok()) << request.status.ToString();
    const RowsReport report = CheckAllRows(request.attention);
    EXPECT_TRUE(report.ok) << report.detail << " seed " << seed_;
    EXPECT_EQ(request.device_name, "cpu");
    EXPECT_GE(request.batch_requests, 1);
    EXPECT_LE(request.batch_requests, 8);
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_EQ(engine_->host_pool().used_bytes(), 0);
}

TEST_F(EngineTest, ADeadlineFiresWhileTheLaneIsBusy) {
  Start();
  const uint64_t running = HoldLane();
  auto request = NewRequest();
  request->deadline = clock_.Now() + std::chrono::milliseconds(5);
  const uint64_t queued = MustSubmit(std::move(request));
  const Request& expired = collector_.WaitFor(queued);
  EXPECT_EQ(expired.status.code(), Code::kDeadlineExceeded);
  EXPECT_FALSE(collector_.Ended(running));
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
}

TEST_F(EngineTest, ADeadlineInThePastIsRefused) {
  Start();
  auto request = NewRequest();
  request->deadline = clock_.Now() - std::chrono::milliseconds(1);
  EXPECT_EQ(Submit(std::move(request)).code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(collector_.WaitFor(MustSubmit(NewRequest())).status.ok());
}

TEST_F(EngineTest, CancelDropsQueuedRequestsAndLeavesRunningOnes) {
  Start();
  const uint64_t running = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  engine_->Cancel(queued);
  EXPECT_EQ(collector_.WaitFor(queued).status.code(), Code::kCancelled);
  engine_->Cancel(running);
  engine_->Cancel(12345);
  EXPECT_FALSE(collector_.Ended(running));
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
  EXPECT_EQ(devices_[0]->submitted_items(), 1);
}

TEST_F(EngineTest, AFullQueueRefusesAndLosesNoRequest) {
  Start();
  HoldLane();
  for (int i = 0; i < 4; ++i) MustSubmit(NewRequest());
  const Status refused = Submit(NewRequest());
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  const int64_t for_queue_ms = engine_->RetryAfterMs(Code::kResourceExhausted);
  EXPECT_GT(for_queue_ms, 0);
  EXPECT_LT(for_queue_ms, 100) << "a queue of 4 is soon empty";
  devices_[0]->Release();
  for (uint64_t id = 1; id <= 5; ++id) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  EXPECT_TRUE(collector_.WaitFor(MustSubmit(NewRequest())).status.ok());
}

TEST_F(EngineTest, MemoryAboveTheBudgetIsRefused) {
  Start();
  const auto request = NewRequest();
  const Result<Admission> refused =
      engine_->Admit(request->attention.problem, "", options_.memory_budget_bytes + 1, 16, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(engine_->host_pool().used_bytes(), 0);
  // The retry hint covers memory held by other requests, however short the queue is.
  const int64_t least_ms = engine_->RetryAfterMs(Code::kResourceExhausted);
  EXPECT_GE(least_ms, 100);
  const Result<HostBlock> held = engine_->host_pool().Take(0, options_.memory_budget_bytes / 2);
  ASSERT_TRUE(held.ok());
  EXPECT_GT(engine_->RetryAfterMs(Code::kResourceExhausted), least_ms);
  EXPECT_LT(engine_->RetryAfterMs(Code::kUnavailable), 100);
}

TEST_F(EngineTest, HigherPriorityRunsFirst) {
  Start();
  HoldLane();
  auto low = NewRequest();
  low->priority = -1;
  auto high = NewRequest();
  high->priority = 1;
  const uint64_t low_id = MustSubmit(std::move(low));
  const uint64_t high_id = MustSubmit(std::move(high));
  devices_[0]->Release();
  EXPECT_LE(collector_.WaitFor(high_id).started, collector_.WaitFor(low_id).started);
}

TEST_F(EngineTest, ABatchMayMixKernelsAndShapes) {
  options_.worker.batcher.batch_requests_max = 8;
  Start();
  HoldLane();
  const char* const kernels[] = {"cpu_reference", "cpu_flash", ""};
  for (int i = 0; i < 3; ++i) {
    auto request = NewRequest(test::MakeSpec(1 + i, 2, 1, 5 + 30 * i, 9, 8 << i, 16));
    request->kernel = kernels[i];
    MustSubmit(std::move(request));
  }
  devices_[0]->Release();
  for (uint64_t id = 2; id <= 4; ++id) {
    const Request& request = collector_.WaitFor(id);
    ASSERT_TRUE(request.status.ok()) << request.status.ToString();
    EXPECT_TRUE(CheckAllRows(request.attention).ok) << "seed " << seed_;
  }
  EXPECT_EQ(devices_[0]->batch_sizes(), (std::vector<int64_t>{1, 3}));
}

TEST_F(EngineTest, DrainFinishesAcceptedRequestsAndRefusesNewOnes) {
  Start();
  const uint64_t running = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  engine_->Drain();
  EXPECT_EQ(Submit(NewRequest()).code(), Code::kUnavailable);
  auto late = NewRequest();
  EXPECT_EQ(engine_->Submit(late).code(), Code::kUnavailable) << "admitted before, sent after";
  EXPECT_FALSE(engine_->WaitIdle(clock_.Now() + std::chrono::milliseconds(3)));
  devices_[0]->Release();
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
  EXPECT_TRUE(collector_.WaitFor(queued).status.ok());
}

TEST_F(EngineTest, AFailedBatchFailsOnlyItsOwnRequests) {
  Start();
  for (int n = 1; n <= 4; ++n) {
    devices_[0]->FailSubmit(n, Internal("planted fault"));
    for (int i = 1; i <= 4; ++i) {
      const Request& ended = collector_.WaitFor(MustSubmit(NewRequest()));
      EXPECT_EQ(ended.status.code(), i == n ? Code::kInternal : Code::kOk) << n << " " << i;
    }
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
}

TEST_F(EngineTest, AFailedItemDoesNotFailItsBatch) {
  options_.worker.batcher.batch_requests_max = 4;
  Start();
  HoldLane();
  for (int i = 0; i < 4; ++i) MustSubmit(NewRequest());
  devices_[0]->FailItem(3, Internal("planted fault"));
  devices_[0]->Release();
  int failed = 0;
  for (uint64_t id = 1; id <= 5; ++id) failed += !collector_.WaitFor(id).status.ok();
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(devices_[0]->batch_sizes(), (std::vector<int64_t>{1, 4}));
}

TEST_F(EngineTest, ALostDeviceFailsOnlyItsOwnRequests) {
  Start(/*devices=*/2);
  devices_[0]->Hold();
  devices_[1]->Hold();
  devices_[0]->LoseDevice();
  // One request runs and one waits on each device; the first goes to device 0.
  std::vector<uint64_t> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(MustSubmit(NewRequest()));
  devices_[0]->WaitForWaiting(1);
  devices_[1]->WaitForWaiting(1);
  devices_[0]->Release();
  for (const uint64_t id : {ids[0], ids[2]}) {
    EXPECT_EQ(collector_.WaitFor(id).status.code(), Code::kUnavailable);
  }
  EXPECT_FALSE(engine_->Devices()[0].healthy);
  EXPECT_TRUE(engine_->Devices()[1].healthy);
  // Device 1 has more outstanding, but is the only healthy one.
  const uint64_t later = MustSubmit(NewRequest());
  devices_[1]->Release();
  for (const uint64_t id : {ids[1], ids[3], later}) {
    const Request& ended = collector_.WaitFor(id);
    EXPECT_TRUE(ended.status.ok());
    EXPECT_EQ(ended.device_name, "cpu1");
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  for (const auto& device : engine_->Devices()) EXPECT_EQ(device.outstanding_batches, 0);
}

// A GPU reports INTERNAL, with CUDA's message, for the batch during which it is lost.
TEST_F(EngineTest, AnyErrorOfALostDeviceBecomesUnavailable) {
  Start(/*devices=*/2);
  devices_[0]->LoseDevice(1, Internal("a batch on cpu: cudaErrorIllegalAddress"));
  const Request& lost = collector_.WaitFor(MustSubmit(NewRequest()));
  EXPECT_EQ(lost.status.code(), Code::kUnavailable) << "it may well succeed elsewhere";
  EXPECT_NE(lost.status.message().find("device cpu is lost"), std::string::npos);
  EXPECT_NE(lost.status.message().find("cudaErrorIllegalAddress"), std::string::npos);
  EXPECT_FALSE(engine_->Devices()[0].healthy);
  EXPECT_EQ(collector_.WaitFor(MustSubmit(NewRequest())).device_name, "cpu1");
}

TEST_F(EngineTest, WithoutAHealthyDeviceRequestsAreUnavailable) {
  Start();
  devices_[0]->LoseDevice();
  EXPECT_EQ(collector_.WaitFor(MustSubmit(NewRequest())).status.code(), Code::kUnavailable);
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_EQ(Submit(NewRequest()).code(), Code::kUnavailable);
}

TEST_F(EngineTest, ARequestPassesFromAFullDeviceToAnother) {
  options_.worker.queue_requests_max = 1;
  options_.worker.batcher.batch_flops_max = 1e5;
  Start(/*devices=*/2);
  const test::ProblemSpec small = test::MakeSpec(1, 1, 1, 16, 16, 8, 8);
  for (test::FakeBackend* device : devices_) device->Hold();
  MustSubmit(NewRequest(test::MakeSpec(1, 1, 1, 32, 32, 8, 8)));
  devices_[0]->WaitForWaiting(1);
  MustSubmit(NewRequest(small));
  devices_[1]->WaitForWaiting(1);
  MustSubmit(NewRequest(small));
  EXPECT_EQ(engine_->Devices()[1].queued, 1) << "its work is less, even with two";
  const uint64_t passed_on = MustSubmit(NewRequest(small));
  EXPECT_EQ(Submit(NewRequest(small)).code(), Code::kResourceExhausted) << "both are full";
  for (test::FakeBackend* device : devices_) device->Release();
  EXPECT_EQ(collector_.WaitFor(passed_on).device_name, "cpu");
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  for (const auto& device : engine_->Devices()) EXPECT_EQ(device.outstanding_batches, 0);
}

TEST_F(EngineTest, ADeviceWithoutLanesFailsTheStart) {
  auto device = std::make_unique<FakeBackend>();
  device->FailMakeLane(1, ResourceExhausted("planted fault"));
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::move(device));
  EXPECT_FALSE(Engine::Make(std::move(backends), options_, metrics_, clock_).ok());
}

}  // namespace
}  // namespace attend
