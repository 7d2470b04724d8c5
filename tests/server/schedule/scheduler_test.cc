// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "server/util/rejection.h"
#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::milliseconds;

SchedulerOptions Options(int lanes) {
  return {.lanes = lanes,
          .queue = {.tenant_weights = {1}},
          .batcher = {.batch_requests_max = 4, .batch_flops_max = 100, .batch_bytes_max = 1000}};
}

Status Push(Scheduler& scheduler, const RequestSpec& spec, TimePoint now = kStart) {
  auto request = MakeRequest(spec);
  const Status status = scheduler.Push(request, now);
  EXPECT_EQ(status.ok(), request == nullptr) << "taken if and only if OK";
  return status;
}

TEST(Scheduler, FillsFreeLanesAndCountsOutstandingCost) {
  Scheduler scheduler(Options(2));
  for (uint64_t id = 1; id <= 9; ++id) EXPECT_TRUE(Push(scheduler, {.id = id}).ok());
  const Scheduler::Step step = scheduler.Plan(kStart);
  ASSERT_EQ(step.launches.size(), 2u);
  EXPECT_NE(step.launches[0].lane, step.launches[1].lane);
  EXPECT_EQ(step.launches[0].requests.size(), 4u);
  EXPECT_EQ(step.launches[1].requests.front()->id, 5u);
  EXPECT_EQ(scheduler.lanes().free, 0);
  EXPECT_EQ(scheduler.running().size(), 8u);
  EXPECT_EQ(scheduler.queue().size(), 1);
  EXPECT_TRUE(scheduler.Plan(kStart).empty());
  scheduler.LaneDone(step.launches[1].lane);
  EXPECT_EQ(scheduler.running().size(), 4u);
  EXPECT_EQ(scheduler.queue().size(), 1);
  const Scheduler::Step last = scheduler.Plan(kStart);
  ASSERT_EQ(last.launches.size(), 1u);
  EXPECT_EQ(last.launches[0].lane, step.launches[1].lane);
  EXPECT_EQ(last.launches[0].requests.front()->id, 9u);
}

TEST(Scheduler, ARequestInPartsRunsAloneHoweverSmall) {
  Scheduler scheduler(Options(1));
  for (uint64_t id = 1; id <= 4; ++id) {
    auto request = MakeRequest({.id = id});
    request->in_parts = id == 2;
    ASSERT_TRUE(scheduler.Push(request, kStart).ok());
  }
  std::vector<std::vector<uint64_t>> batches;
  for (;;) {
    const Scheduler::Step step = scheduler.Plan(kStart);
    if (step.empty()) break;
    batches.emplace_back();
    for (const auto& request : step.launches.front().requests) {
      batches.back().push_back(request->id);
      EXPECT_EQ(request->large, request->id == 2);
    }
    EXPECT_EQ(step.launches.front().large, batches.size() == 2);
    scheduler.LaneDone(0);
  }
  EXPECT_EQ(batches, (std::vector<std::vector<uint64_t>>{{1}, {2}, {3, 4}}));
}

TEST(Scheduler, MarksLargeRequestsAndTheirCost) {
  Scheduler scheduler(Options(2));
  EXPECT_TRUE(Push(scheduler, {.id = 1, .flops = 50}).ok());
  EXPECT_TRUE(Push(scheduler, {.id = 2, .flops = 250}).ok());
  EXPECT_TRUE(Push(scheduler, {.id = 3, .flops = 300}).ok());
  const Scheduler::Step step = scheduler.Plan(kStart + milliseconds(3));
  ASSERT_EQ(step.launches.size(), 2u);
  const Request& small = *step.launches[0].requests.front();
  const Request& large = *step.launches[1].requests.front();
  EXPECT_EQ(step.launches[0].closed, BatchClosed::kLarge);
  EXPECT_FALSE(step.launches[0].large);
  EXPECT_FALSE(small.large);
  EXPECT_EQ(small.cost, kBatchCost / 2);
  EXPECT_EQ(small.enqueued, kStart);
  EXPECT_TRUE(step.launches[1].large && large.large);
  EXPECT_EQ(large.cost, kBatchCost * 5 / 2);
  scheduler.LaneDone(step.launches[0].lane);
  EXPECT_TRUE(scheduler.Plan(kStart).launches.empty()) << "the last lane is for small ones";
  scheduler.LaneDone(step.launches[1].lane);
  EXPECT_EQ(scheduler.Plan(kStart).launches.size(), 1u);
}

// Shares survive an empty queue as long as something runs: with few requests in flight the queue is
// empty most of the time.
TEST(Scheduler, RunningRequestsCountAlthoughTheQueueWasEmpty) {
  for (const bool idle_between : {false, true}) {
    SchedulerOptions options = Options(1);
    options.queue.tenant_weights = {1, 1};
    options.batcher.batch_requests_max = 1;
    Scheduler scheduler(options);
    EXPECT_TRUE(Push(scheduler, {.id = 1, .tenant = 0, .flops = 90}).ok());
    const Scheduler::Step first = scheduler.Plan(kStart);
    ASSERT_EQ(first.launches.size(), 1u);
    if (idle_between) scheduler.LaneDone(first.launches[0].lane);
    EXPECT_TRUE(Push(scheduler, {.id = 2, .tenant = 0, .flops = 90}).ok());
    EXPECT_TRUE(Push(scheduler, {.id = 3, .tenant = 1, .flops = 90}).ok());
    if (!idle_between) scheduler.LaneDone(first.launches[0].lane);
    const Scheduler::Step next = scheduler.Plan(kStart);
    ASSERT_EQ(next.launches.size(), 1u);
    EXPECT_EQ(next.launches[0].requests.front()->id, idle_between ? 2u : 3u);
  }
}

TEST(Scheduler, ExpiresRequestsWhileEveryLaneIsBusy) {
  Scheduler scheduler(Options(1));
  EXPECT_TRUE(Push(scheduler, {.id = 1}).ok());
  EXPECT_EQ(scheduler.Plan(kStart).launches.size(), 1u);
  const TimePoint deadline = kStart + milliseconds(5);
  EXPECT_TRUE(Push(scheduler, {.id = 2, .deadline = deadline}).ok());
  const Scheduler::Step waits = scheduler.Plan(kStart);
  EXPECT_TRUE(waits.empty());
  EXPECT_EQ(waits.wake, deadline);
  const Scheduler::Step step = scheduler.Plan(deadline);
  ASSERT_EQ(step.ended.size(), 1u);
  EXPECT_EQ(step.ended[0]->status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(step.wake, kNever);
}

TEST(Scheduler, CancelAfterTheDeadlineIsDeadlineExceeded) {
  Scheduler scheduler(Options(1));
  EXPECT_TRUE(Push(scheduler, {.id = 1}).ok());
  EXPECT_TRUE(Push(scheduler, {.id = 2, .deadline = kStart + milliseconds(5)}).ok());
  EXPECT_EQ(scheduler.Cancel(3, kStart), nullptr);
  EXPECT_EQ(scheduler.Cancel(1, kStart)->status.code(), Code::kCancelled);
  EXPECT_EQ(scheduler.Cancel(1, kStart), nullptr);
  EXPECT_EQ(scheduler.Cancel(2, kStart + milliseconds(5))->status.code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(scheduler.Plan(kStart).empty());
}

TEST(Scheduler, StopsOnlyRunningRequestsPastTheirDeadline) {
  Scheduler scheduler(Options(2));
  const TimePoint early = kStart + milliseconds(5);
  const TimePoint late = kStart + milliseconds(9);
  EXPECT_TRUE(Push(scheduler, {.id = 1}).ok());
  EXPECT_TRUE(Push(scheduler, {.id = 2, .deadline = late}).ok());
  EXPECT_TRUE(Push(scheduler, {.id = 3, .deadline = early}).ok());
  Scheduler::Step step = scheduler.Plan(kStart);
  ASSERT_EQ(step.launches.size(), 1u);
  EXPECT_EQ(step.wake, early);
  const auto stopped = [&] {
    std::vector<uint64_t> ids;
    for (const auto& request : step.launches[0].requests) {
      if (request->stop.set()) ids.push_back(request->id);
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  };
  EXPECT_EQ(scheduler.Plan(early - milliseconds(1)).wake, early);
  EXPECT_TRUE(stopped().empty());
  EXPECT_EQ(scheduler.Plan(early).wake, late);
  EXPECT_EQ(stopped(), (std::vector<uint64_t>{3}));
  EXPECT_EQ(scheduler.Plan(late).wake, kNever);
  EXPECT_EQ(stopped(), (std::vector<uint64_t>{2, 3}));
  for (const auto& request : step.launches[0].requests) {
    EXPECT_EQ(request->stop_code, request->stop.set() ? Code::kDeadlineExceeded : Code::kOk);
  }
  scheduler.LaneEnded(step.launches[0].lane, BatchEnd::kStopped, late);
  step.launches[0].requests.clear();  // freed: the scheduler must not read them again
  EXPECT_EQ(scheduler.Cancel(1, late), nullptr);
  scheduler.StopAll(Code::kUnavailable);
  scheduler.LaneDone(step.launches[0].lane);
  EXPECT_TRUE(scheduler.Plan(late).empty());
}

TEST(Scheduler, TheFirstReasonToStopARunningRequestStays) {
  Scheduler scheduler(Options(1));
  EXPECT_TRUE(Push(scheduler, {.id = 1, .deadline = kStart + milliseconds(5)}).ok());
  EXPECT_TRUE(Push(scheduler, {.id = 2}).ok());
  const Scheduler::Step step = scheduler.Plan(kStart);
  ASSERT_EQ(step.launches.size(), 1u);
  ASSERT_EQ(step.launches[0].requests.size(), 2u);
  EXPECT_EQ(scheduler.Cancel(1, kStart), nullptr) << "it ends with its batch";
  scheduler.StopAll(Code::kUnavailable);
  for (const auto& request : step.launches[0].requests) {
    EXPECT_TRUE(request->stop.set());
    EXPECT_EQ(request->stop_code, request->id == 1 ? Code::kCancelled : Code::kUnavailable);
  }
  EXPECT_EQ(scheduler.Plan(kStart).wake, kNever) << "what was stopped has no deadline any more";
}

TEST(Scheduler, CloseEndsQueuedRequestsAndLeavesRunningOnes) {
  Scheduler scheduler(Options(1));
  EXPECT_TRUE(Push(scheduler, {.id = 1}).ok());
  const Scheduler::Step step = scheduler.Plan(kStart);
  EXPECT_TRUE(Push(scheduler, {.id = 2}).ok());
  const auto ended = scheduler.Close(Unavailable("the device is lost"));
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0]->status.message(), "the device is lost");
  EXPECT_TRUE(scheduler.Close(Unavailable("stopping")).empty());
  EXPECT_EQ(Push(scheduler, {.id = 3}).message(), "the device is lost");
  EXPECT_EQ(scheduler.lanes().free, 0);
  scheduler.LaneDone(step.launches[0].lane);
  EXPECT_EQ(scheduler.lanes().free, 1);
  EXPECT_TRUE(scheduler.running().empty());
}

// The scheduler has learned that requests take 10 ms.
class LateTest : public testing::Test {
 protected:
  LateTest() {
    Run(1);
    scheduler_.LaneEnded(0, BatchEnd::kWhole, kStart + milliseconds(10));
    scheduler_.LaneDone(0);
    now_ = kNow;
  }

  const TimePoint kNow = kStart + milliseconds(10);

  Status Push(uint64_t id, TimePoint deadline = kNever, int tenant = 0) {
    auto request = MakeRequest({.id = id, .tenant = tenant, .deadline = deadline, .flops = 90});
    request->received = now_;
    const Status status = scheduler_.Push(request, now_);
    refused_ = std::move(request);
    return status;
  }
  void Run(uint64_t id) {
    ASSERT_TRUE(Push(id).ok());
    running_ = scheduler_.Plan(now_).launches;
    ASSERT_EQ(running_.size(), 1u);
  }

  Scheduler scheduler_{
      {.lanes = 1, .queue = {.tenant_weights = {1, 1}}, .batcher = {.batch_flops_max = 100}}};
  TimePoint now_ = kStart;
  std::vector<Scheduler::Launch> running_;
  std::unique_ptr<Request> refused_;
};

TEST_F(LateTest, ARequestThatWouldBeLateIsRefusedWithARetryHint) {
  EXPECT_TRUE(Push(2, kNow + milliseconds(10)).ok());
  const Status late = Push(3, kNow + milliseconds(15));
  EXPECT_EQ(late.code(), Code::kResourceExhausted);
  EXPECT_EQ(RejectionOf(late), Rejection::kLate);
  EXPECT_EQ(refused_->refusal.retry_after_ms, 8) << "10 ms, a quarter of them, and 10 for itself";
  EXPECT_EQ(scheduler_.queue().size(), 1) << "it is not taken";
  EXPECT_EQ(Push(5, kNow + milliseconds(11)).code(), Code::kDeadlineExceeded) << "12 ms more";
  EXPECT_TRUE(Push(4, kNow + milliseconds(23)).ok());
}

TEST_F(LateTest, AHopelessRequestHasNoRetryHint) {
  const Status hopeless = Push(2, kNow + milliseconds(9));
  EXPECT_EQ(hopeless.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(RejectionOf(hopeless), Rejection::kLate);
  EXPECT_EQ(refused_->refusal.retry_after_ms, 0);
}

TEST_F(LateTest, TheTimeUntilALaneStartsCounts) {
  ASSERT_TRUE(Push(2).ok());
  running_ = scheduler_.Plan(kNow + milliseconds(8)).launches;
  ASSERT_EQ(running_.size(), 1u);
  scheduler_.LaneEnded(0, BatchEnd::kWhole, kNow + milliseconds(18));
  EXPECT_EQ(Push(3, kNow + milliseconds(10) + std::chrono::microseconds(900)).code(),
            Code::kDeadlineExceeded)
      << "an eighth of the 8 ms";
}

TEST_F(LateTest, LaneStartTimesDoNotSpanAnEmptyQueue) {
  ASSERT_TRUE(Push(2).ok());
  EXPECT_NE(scheduler_.Cancel(2, kNow + milliseconds(8)), nullptr);
  now_ = kNow + milliseconds(9);
  Run(3);
  scheduler_.LaneEnded(0, BatchEnd::kWhole, now_ + milliseconds(10));
  scheduler_.LaneDone(0);
  now_ += milliseconds(10);
  EXPECT_TRUE(Push(4, now_ + milliseconds(10)).ok());
}

TEST_F(LateTest, OneHopelessRequestMayWaitForATryAndUsesItOnlyIfItRuns) {
  now_ = kNow + milliseconds(500);
  Run(2);
  now_ += milliseconds(8);
  EXPECT_TRUE(Push(3, now_ + milliseconds(9)).ok());
  EXPECT_FALSE(Push(4, now_ + milliseconds(9)).ok()) << "one waits";
  EXPECT_NE(scheduler_.Cancel(3, now_), nullptr);
  EXPECT_TRUE(Push(5, now_ + milliseconds(9)).ok());
  scheduler_.LaneDone(0);
  const Scheduler::Step step = scheduler_.Plan(now_);
  ASSERT_EQ(step.launches.size(), 1u);
  EXPECT_EQ(step.launches[0].requests[0]->id, 5u);
  EXPECT_FALSE(Push(6, now_ + milliseconds(9)).ok()) << "one has just begun";
}

TEST(Scheduler, TheBatchDelayIsNotCountedAsDeviceTime) {
  SchedulerOptions options = Options(1);
  options.batcher.batch_delay = milliseconds(50);
  Scheduler scheduler(options);
  EXPECT_TRUE(Push(scheduler, {.id = 1}).ok());
  EXPECT_TRUE(scheduler.Plan(kStart).launches.empty());
  const TimePoint begin = kStart + milliseconds(50);
  const Scheduler::Step step = scheduler.Plan(begin);
  ASSERT_EQ(step.launches.size(), 1u);
  scheduler.LaneEnded(0, BatchEnd::kWhole, begin + milliseconds(10));
  EXPECT_TRUE(Push(scheduler, {.id = 2}).ok());
  EXPECT_EQ(scheduler.Backlog(begin + milliseconds(10)), std::chrono::microseconds(12'500));
}

TEST_F(LateTest, ARequestThatBecameLateInTheQueueDoesNotStart) {
  Run(2);
  ASSERT_TRUE(Push(3, kNow + milliseconds(30)).ok());
  ASSERT_TRUE(Push(4).ok());
  EXPECT_EQ(scheduler_.Plan(kNow + milliseconds(1)).wake, kNow + milliseconds(20));
  const Scheduler::Step step = scheduler_.Plan(kNow + milliseconds(20));
  ASSERT_EQ(step.ended.size(), 1u);
  EXPECT_EQ(step.ended[0]->id, 3u);
  EXPECT_EQ(step.ended[0]->status.code(), Code::kResourceExhausted) << "it had 30 ms for 10";
  EXPECT_GT(step.ended[0]->refusal.retry_after_ms, 0);
}

TEST_F(LateTest, ATenantsBacklogDoesNotRefuseAnothersRequests) {
  uint64_t id = 2;
  while (Push(id, kNow + milliseconds(300)).ok()) ++id;
  EXPECT_EQ(id, 2u + 24);
  EXPECT_TRUE(Push(++id, kNow + milliseconds(25), 1).ok()) << "of each tenant one after the other";
  EXPECT_FALSE(Push(++id, kNow + milliseconds(25), 1).ok());
}

// Request 3 would be in time both before 4 and after it.
TEST_F(LateTest, OnlyACancelNearTheDeadlineMakesTheQueueLate) {
  for (const int left : {90, 15}) {
    SCOPED_TRACE(left);
    now_ += milliseconds(1000);
    const TimePoint begin = now_;
    Run(2);
    ASSERT_TRUE(Push(3, begin + milliseconds(800)).ok());
    ASSERT_TRUE(Push(4, begin + milliseconds(810)).ok());
    ASSERT_TRUE(Push(5, begin + milliseconds(400)).ok());
    now_ = begin + milliseconds(400 - left);
    EXPECT_NE(scheduler_.Cancel(5, now_), nullptr);
    for (const uint64_t next : {left == 15 ? 4u : 3u, left == 15 ? 3u : 4u}) {
      scheduler_.LaneDone(0);
      running_ = scheduler_.Plan(now_).launches;
      ASSERT_EQ(running_.size(), 1u);
      EXPECT_EQ(running_[0].requests.front()->id, next);
    }
    scheduler_.LaneDone(0);
  }
}

// Two lanes and two tenants; a request of 1000 * n flops takes n milliseconds.
class SparedTest : public testing::Test {
 protected:
  SparedTest() {
    for (const double flops : {4000.0, 200'000.0}) {
      EXPECT_EQ(Launch({.id = 1, .flops = flops}), 1u);
      now_ += milliseconds(static_cast<int>(flops) / 1000);
      scheduler_.LaneEnded(0, BatchEnd::kWhole, now_);
      scheduler_.LaneDone(0);
    }
  }

  // Pushes a request. Returns the first of the waiting ones that starts at once; 0 if none does.
  uint64_t Launch(const RequestSpec& spec) {
    auto request = MakeRequest(spec);
    request->received = now_;
    EXPECT_TRUE(scheduler_.Push(request, now_).ok());
    Scheduler::Step step = scheduler_.Plan(now_);
    EXPECT_LE(step.launches.size(), 1u);
    if (step.launches.empty()) return 0;
    running_.push_back(std::move(step.launches[0].requests));
    return running_.back().front()->id;
  }

  TimePoint now_ = kStart;
  Scheduler scheduler_{
      {.lanes = 2, .queue = {.tenant_weights = {1, 1}}, .batcher = {.batch_flops_max = 5000}}};
  std::vector<std::vector<std::unique_ptr<Request>>> running_;
};

TEST_F(SparedTest, ALargeRequestDoesNotKeepALaneFree) {
  EXPECT_EQ(Launch({.id = 2, .deadline = now_ + milliseconds(204), .flops = 200'000}), 2u);
  EXPECT_EQ(Launch({.id = 3, .tenant = 1, .flops = 4000}), 3u);
  scheduler_.LaneDone(1);
  EXPECT_EQ(Launch({.id = 4, .tenant = 0, .flops = 4000}), 4u);
}

TEST_F(SparedTest, ABatchKeepsALaneFreeOnlyFromItsOwnTenant) {
  EXPECT_EQ(Launch({.id = 2, .deadline = now_ + milliseconds(5), .flops = 4000}), 2u);
  EXPECT_EQ(Launch({.id = 3, .flops = 4000}), 0u);
  EXPECT_EQ(Launch({.id = 4, .tenant = 1, .flops = 4000}), 4u) << "although 3 comes before it";
  scheduler_.LaneDone(1);
  EXPECT_EQ(Launch({.id = 5, .priority = 1, .flops = 4000}), 5u);
}

}  // namespace
}  // namespace attend::test
