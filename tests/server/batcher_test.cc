// SPDX-License-Identifier: Apache-2.0

#include "server/batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace attend {
namespace {

using std::chrono::microseconds;

const TimePoint kStart{std::chrono::seconds(1000)};

std::unique_ptr<Request> MakeRequest(uint64_t id, double flops, TimePoint enqueued = kStart,
                                     int32_t priority = 0) {
  auto request = std::make_unique<Request>();
  request->id = id;
  request->flops = flops;
  request->enqueued = enqueued;
  request->priority = priority;
  return request;
}

void Push(RequestQueue& queue, std::unique_ptr<Request> request) {
  ASSERT_TRUE(queue.Push(request).ok());
}

std::vector<uint64_t> TakeIds(RequestQueue& queue, const BatchDecision& decision) {
  std::vector<uint64_t> ids;
  for (const QueueKey& key : decision.take) ids.push_back(queue.Take(key)->id);
  return ids;
}

BatcherOptions Options() {
  BatcherOptions options;
  options.batch_requests_max = 4;
  options.batch_flops_max = 100;
  return options;
}

TEST(Batcher, AFreeLaneTakesWhatWaitsWithoutDelay) {
  RequestQueue queue(100);
  Push(queue, MakeRequest(1, 10));
  const BatchDecision decision = Batcher(Options()).Next(queue, {2, 2, 0}, kStart);
  EXPECT_EQ(TakeIds(queue, decision), (std::vector<uint64_t>{1}));
}

TEST(Batcher, NoFreeLaneTakesNothingAndWakesForTheDeadline) {
  RequestQueue queue(100);
  auto request = MakeRequest(1, 10);
  request->deadline = kStart + microseconds(70);
  Push(queue, std::move(request));
  const BatchDecision decision = Batcher(Options()).Next(queue, {2, 0, 0}, kStart);
  EXPECT_TRUE(decision.take.empty());
  EXPECT_EQ(decision.wake, kStart + microseconds(70));
}

TEST(Batcher, StopsAtEachBudget) {
  RequestQueue queue(100);
  for (uint64_t id = 1; id <= 6; ++id) Push(queue, MakeRequest(id, 10));
  const Batcher batcher(Options());
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {1, 1, 0}, kStart)),
            (std::vector<uint64_t>{1, 2, 3, 4}));  // requests
  Push(queue, MakeRequest(7, 85));
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {1, 1, 0}, kStart)),
            (std::vector<uint64_t>{5, 6}));  // FLOPs
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {1, 1, 0}, kStart)), (std::vector<uint64_t>{7}));
}

TEST(Batcher, ALargeRequestRunsAlone) {
  RequestQueue queue(100);
  Push(queue, MakeRequest(1, 10));
  Push(queue, MakeRequest(2, 1000));
  Push(queue, MakeRequest(3, 10));
  const Batcher batcher(Options());
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 2, 0}, kStart)), (std::vector<uint64_t>{1}));
  const BatchDecision large = batcher.Next(queue, {2, 2, 0}, kStart);
  EXPECT_TRUE(large.large);
  EXPECT_EQ(TakeIds(queue, large), (std::vector<uint64_t>{2}));
}

TEST(Batcher, LargeRequestsLeaveOneLaneToSmallOnes) {
  RequestQueue queue(100);
  Push(queue, MakeRequest(1, 1000));
  Push(queue, MakeRequest(2, 10));
  const Batcher batcher(Options());
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 1, 1}, kStart)), (std::vector<uint64_t>{2}));
  EXPECT_TRUE(batcher.Next(queue, {2, 1, 1}, kStart).take.empty());
  EXPECT_EQ(TakeIds(queue, batcher.Next(queue, {2, 2, 0}, kStart)), (std::vector<uint64_t>{1}));
}

TEST(Batcher, WithOneLaneALargeRequestStillRuns) {
  RequestQueue queue(100);
  Push(queue, MakeRequest(1, 1000));
  EXPECT_EQ(TakeIds(queue, Batcher(Options()).Next(queue, {1, 1, 0}, kStart)),
            (std::vector<uint64_t>{1}));
}

TEST(Batcher, DelayWaitsForCompanyFromTheOldestRequest) {
  BatcherOptions options = Options();
  options.batch_delay = microseconds(50);
  const Batcher batcher(options);
  RequestQueue queue(100);
  Push(queue, MakeRequest(1, 10, kStart + microseconds(10)));
  Push(queue, MakeRequest(2, 10, kStart, /*priority=*/-1));
  const BatchDecision early = batcher.Next(queue, {1, 1, 0}, kStart + microseconds(20));
  EXPECT_TRUE(early.take.empty());
  EXPECT_EQ(early.wake, kStart + microseconds(50));
  EXPECT_EQ(batcher.Next(queue, {1, 1, 0}, kStart + microseconds(50)).take.size(), 2u);
  Push(queue, MakeRequest(3, 10));
  Push(queue, MakeRequest(4, 10));
  EXPECT_EQ(batcher.Next(queue, {1, 1, 0}, kStart).take.size(), 4u) << "a full batch does not wait";
}

// Thousands of seeded arrivals on lanes that take as long as their FLOPs say, with time moved by
// hand: every request runs or expires exactly once, budgets hold, no lane idles while work that
// may run waits, and large requests never hold every lane.
void Simulate(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  BatcherOptions options = Options();
  if (random() % 2) options.batch_delay = microseconds(random() % 40);
  const Batcher batcher(options);
  RequestQueue queue(32);
  constexpr int kLanes = 3;
  struct Running {
    bool large;
  };
  std::multimap<TimePoint, Running> running;
  std::multiset<uint64_t> ended;
  uint64_t accepted = 0;
  TimePoint now = kStart;
  for (uint64_t id = 1; id <= 400 || !queue.empty() || !running.empty(); ++id) {
    now += microseconds(random() % 20);
    while (!running.empty() && running.begin()->first <= now) running.erase(running.begin());
    if (id <= 400) {
      auto request = MakeRequest(id, random() % 10 == 0 ? 1000 : 1 + random() % 60, now,
                                 static_cast<int32_t>(random() % 3));
      if (random() % 3 == 0) request->deadline = now + microseconds(random() % 300);
      if (queue.Push(request).ok()) ++accepted;
    }
    for (const auto& request : queue.TakeExpired(now)) ended.insert(request->id);
    for (;;) {
      LaneState lanes{kLanes, kLanes - static_cast<int>(running.size()), 0};
      for (const auto& [end, run] : running) lanes.large += run.large;
      const BatchDecision decision = batcher.Next(queue, lanes, now);
      if (decision.take.empty()) {
        const bool small_waits = std::any_of(
            queue.ordered().begin(), queue.ordered().end(),
            [&](const auto& entry) { return !batcher.IsLarge(entry.second->flops, 0); });
        if (lanes.free > 0 && small_waits) {
          ASSERT_LT(now, decision.wake);
          ASSERT_LE(decision.wake, now + options.batch_delay) << "work waits and a lane idles";
        }
        break;
      }
      ASSERT_GT(lanes.free, 0);
      double flops = 0;
      for (const QueueKey& key : decision.take) {
        const auto request = queue.Take(key);
        flops += request->flops;
        ended.insert(request->id);
      }
      ASSERT_LE(decision.take.size(), 4u);
      if (!decision.large) {
        ASSERT_LE(flops, options.batch_flops_max);
      }
      running.emplace(now + microseconds(static_cast<int64_t>(flops)), Running{decision.large});
      int large = 0;
      for (const auto& [end, run] : running) large += run.large;
      ASSERT_LT(large, kLanes);
    }
  }
  EXPECT_EQ(ended.size(), accepted);
  EXPECT_EQ(std::set<uint64_t>(ended.begin(), ended.end()).size(), accepted) << "ended twice";
}

TEST(Batcher, SimulatedSchedulesKeepEveryPromise) {
  const uint64_t base = std::random_device{}();
  for (uint64_t i = 0; i < 500 && !::testing::Test::HasFailure(); ++i) Simulate(base + i);
}

}  // namespace
}  // namespace attend
