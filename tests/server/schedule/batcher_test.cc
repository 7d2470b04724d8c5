// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/batcher.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::microseconds;
using Taken = std::vector<uint64_t>;

const Outlook kIdle({}, /*lane_free=*/true, kStart);  // nothing runs

BatcherOptions Options() {
  BatcherOptions options;
  options.batch_requests_max = 4;
  options.batch_flops_max = 100;
  options.batch_bytes_max = 1000;
  return options;
}

// As the scheduler pushes.
void Push(RequestQueue& queue, const RequestSpec& spec, int64_t bytes = 0) {
  const Batcher batcher(Options());
  auto request = MakeRequest(spec);
  request->batch_bytes = bytes;
  request->large = batcher.IsLarge(spec.flops, bytes);
  request->cost = batcher.Cost(spec.flops, bytes);
  ASSERT_TRUE(queue.Push(request).ok());
}

Taken TakeIds(RequestQueue& queue, const BatchDecision& decision) {
  Taken ids;
  for (const auto& request : queue.TakeBatch(decision.take, decision.aged)) {
    ids.push_back(request->id);
  }
  return ids;
}

TEST(Batcher, AFreeLaneTakesWaitingRequestsWithoutDelay) {
  RequestQueue queue({.tenant_weights = {1}});
  Push(queue, {.id = 1});
  const BatchDecision decision = Batcher(Options()).Next(queue, {2, 2, 0}, kIdle, kStart);
  EXPECT_EQ(decision.closed, BatchClosed::kEmpty);
  EXPECT_EQ(TakeIds(queue, decision), Taken{1});
}

TEST(Batcher, WithoutAFreeLaneNothingIsTakenButTheDeadlineWakes) {
  RequestQueue queue({.tenant_weights = {1}});
  Push(queue, {.id = 1, .deadline = kStart + microseconds(70)});
  const BatchDecision decision = Batcher(Options()).Next(queue, {2, 0, 0}, kIdle, kStart);
  EXPECT_TRUE(decision.take.empty());
  EXPECT_EQ(decision.wake, kStart + microseconds(70));
}

TEST(Batcher, StopsAtEachBudgetAndNamesIt) {
  RequestQueue queue({.tenant_weights = {1}});
  const Batcher batcher(Options());
  const auto next = [&](BatchClosed closed) {
    const BatchDecision decision = batcher.Next(queue, {1, 1, 0}, kIdle, kStart);
    EXPECT_EQ(decision.closed, closed);
    return TakeIds(queue, decision);
  };
  for (uint64_t id = 1; id <= 6; ++id) Push(queue, {.id = id});
  EXPECT_EQ(next(BatchClosed::kRequests), (Taken{1, 2, 3, 4}));
  Push(queue, {.id = 7, .flops = 85});
  EXPECT_EQ(next(BatchClosed::kFlops), (Taken{5, 6}));
  Push(queue, {.id = 8}, 400);
  Push(queue, {.id = 9, .flops = 1}, 601);
  EXPECT_EQ(next(BatchClosed::kBytes), (Taken{7, 8}));
  Push(queue, {.id = 10, .flops = 1}, 399);
  EXPECT_EQ(next(BatchClosed::kEmpty), (Taken{9, 10})) << "exactly full";
  for (uint64_t id = 11; id <= 14; ++id) Push(queue, {.id = id});
  EXPECT_EQ(next(BatchClosed::kRequests), (Taken{11, 12, 13, 14})) << "full and nothing left";
}

TEST(Batcher, ALargeRequestRunsAlone) {
  RequestQueue queue({.tenant_weights = {1}});
  Push(queue, {.id = 1});
  Push(queue, {.id = 2, .flops = 1000});
  Push(queue, {.id = 3}, 1001);
  Push(queue, {.id = 4});
  const Batcher batcher(Options());
  const BatchDecision before = batcher.Next(queue, {2, 2, 0}, kIdle, kStart);
  EXPECT_FALSE(before.large);
  EXPECT_EQ(before.closed, BatchClosed::kLarge);
  EXPECT_EQ(TakeIds(queue, before), Taken{1});
  for (const uint64_t id : {2, 3}) {
    const BatchDecision large = batcher.Next(queue, {2, 2, 0}, kIdle, kStart);
    EXPECT_TRUE(large.large);
    EXPECT_EQ(large.closed, BatchClosed::kLarge);
    EXPECT_EQ(TakeIds(queue, large), Taken{id});
  }
}

TEST(Batcher, LargeRequestsLeaveOneLaneToSmallOnes) {
  RequestQueue queue({.tenant_weights = {1}});
  Push(queue, {.id = 1, .flops = 1000});
  Push(queue, {.id = 2});
  const Batcher batcher(Options());
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 1, 1}, kIdle, kStart)), Taken{2});
  EXPECT_TRUE(batcher.Next(queue, {2, 1, 1}, kIdle, kStart).take.empty());
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 2, 0}, kIdle, kStart)), Taken{1});
}

TEST(Batcher, WithOneLaneALargeRequestStillRuns) {
  RequestQueue queue({.tenant_weights = {1}});
  Push(queue, {.id = 1, .flops = 1000});
  EXPECT_EQ(TakeIds(queue, Batcher(Options()).Next(queue, {1, 1, 0}, kIdle, kStart)), Taken{1});
}

TEST(Batcher, TheBatchDelayCountsFromTheOldestRequest) {
  BatcherOptions options = Options();
  options.batch_delay = microseconds(50);
  const Batcher batcher(options);
  RequestQueue queue({.tenant_weights = {1}});
  Push(queue, {.id = 2, .priority = -1});
  Push(queue, {.id = 1, .enqueued = kStart + microseconds(10)});
  const BatchDecision early = batcher.Next(queue, {1, 1, 0}, kIdle, kStart + microseconds(20));
  EXPECT_TRUE(early.take.empty());
  EXPECT_EQ(early.wake, kStart + microseconds(50));
  const BatchDecision late = batcher.Next(queue, {1, 1, 0}, kIdle, kStart + microseconds(50));
  EXPECT_EQ(late.take.size(), 2u);
  EXPECT_EQ(late.closed, BatchClosed::kDelay);
  const TimePoint now = kStart + microseconds(10);
  Push(queue, {.id = 3, .enqueued = now});
  Push(queue, {.id = 4, .enqueued = now});
  EXPECT_EQ(batcher.Next(queue, {1, 1, 0}, kIdle, now).take.size(), 4u)
      << "a full batch does not wait";
  queue.TakeAll();
  Push(queue, {.id = 5});
  Push(queue, {.id = 6, .flops = 1000});
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 2, 0}, kIdle, kStart)), Taken{5})
      << "nor one that a large request closes";
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 2, 0}, kIdle, kStart)), Taken{6})
      << "which finds company never";
}

TEST(Batcher, TheBatchDelayDoesNotMakeARequestLate) {
  BatcherOptions options = Options();
  options.batch_delay = microseconds(50);
  const Batcher batcher(options);
  RequestQueue queue({.tenant_weights = {1}});
  auto request = MakeRequest({.id = 1, .deadline = kStart + microseconds(40)});
  request->expected = microseconds(10);
  ASSERT_TRUE(queue.Push(request).ok());
  EXPECT_EQ(batcher.Next(queue, {1, 1, 0}, kIdle, kStart).wake, kStart + microseconds(15));
  EXPECT_EQ(batcher.Next(queue, {1, 1, 0}, kIdle, kStart + microseconds(15)).take.size(), 1u);
}

TEST(Batcher, CostIsTheLargerShareOfABatchAndNeverZero) {
  const Batcher batcher(Options());
  EXPECT_EQ(batcher.Cost(50, 0), kBatchCost / 2);
  EXPECT_EQ(batcher.Cost(50, 750), kBatchCost / 4 * 3);
  EXPECT_EQ(batcher.Cost(300, 750), kBatchCost * 3);
  EXPECT_EQ(batcher.Cost(0, 0), kCostMin);
  EXPECT_EQ(batcher.Cost(1e300, 0), kCostMax);
  EXPECT_EQ(batcher.Cost(0, std::numeric_limits<int64_t>::max()), kCostMax);
  BatcherOptions none = Options();
  none.batch_flops_max = 0;
  EXPECT_EQ(Batcher(none).Cost(0, 0), kCostMax);
  EXPECT_EQ(Batcher(none).Cost(1, 0), kCostMax);
}

}  // namespace
}  // namespace attend::test
