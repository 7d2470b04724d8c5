// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/queue_order.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Ordered = std::vector<uint64_t>;

constexpr Duration kAging = milliseconds(100);

// Takes `count` requests one by one and pushes the next of the same kind each time, so that all
// kinds keep waiting. Returns how many of each kind were taken.
std::vector<int> ServeBacklog(RequestQueue& queue, std::vector<RequestSpec> kinds, int count) {
  std::vector<int> taken(kinds.size());
  std::vector<size_t> kind_of;
  uint64_t id = 1000;
  for (size_t i = 0; i < kinds.size(); ++i) {
    kinds[i].id = id + kind_of.size();
    kind_of.push_back(i);
    EXPECT_TRUE(Push(queue, kinds[i]).ok());
  }
  for (int i = 0; i < count; ++i) {
    const size_t kind = kind_of.at(TakeNext(queue) - id);
    ++taken[kind];
    kinds[kind].id = id + kind_of.size();
    kind_of.push_back(kind);
    EXPECT_TRUE(Push(queue, kinds[kind]).ok());
  }
  return taken;
}

TEST(QueueOrder, OrdersByPriorityThenDeadlineThenArrival) {
  RequestQueue queue({.tenant_weights = {1}, .aging = kAging});
  for (const RequestSpec& spec : {
           RequestSpec{.id = 1},
           RequestSpec{.id = 2, .deadline = kStart + milliseconds(9)},
           RequestSpec{.id = 3, .priority = 5},
           RequestSpec{.id = 4, .deadline = kStart + milliseconds(3)},
           RequestSpec{.id = 5, .priority = -5, .deadline = kStart + milliseconds(1)},
           RequestSpec{.id = 6},
           RequestSpec{.id = 7, .deadline = kStart + seconds(60)},
       }) {
    EXPECT_TRUE(Push(queue, spec).ok());
  }
  EXPECT_EQ(Ids(queue), (Ordered{3, 4, 2, 1, 6, 7, 5})) << "far deadlines rank as none";
}

TEST(QueueOrder, ARequestIsOvertakenOnlyUntilItIsDue) {
  RequestQueue queue({.tenant_weights = {1}, .aging = kAging});
  EXPECT_TRUE(Push(queue, {.id = 1}).ok());
  const TimePoint before = kStart + milliseconds(98);
  EXPECT_TRUE(
      Push(queue, {.id = 2, .enqueued = before, .deadline = before + milliseconds(1)}).ok());
  const TimePoint after = kStart + milliseconds(101);
  EXPECT_TRUE(Push(queue, {.id = 3, .enqueued = after, .deadline = after + milliseconds(1)}).ok());
  EXPECT_EQ(Ids(queue), (Ordered{2, 1, 3}));
}

TEST(QueueOrder, TenantsShareByCostAndWeight) {
  RequestQueue queue({.tenant_weights = {1, 3, 3}});
  const std::vector<int> taken = ServeBacklog(
      queue, {{.tenant = 0}, {.tenant = 1}, {.tenant = 2, .cost = kBatchCost / 4}}, 1600);
  EXPECT_NEAR(taken[0], 100, 2);
  EXPECT_NEAR(taken[1], 300, 2);
  EXPECT_NEAR(taken[2], 1200, 2) << "a quarter of the cost, four times as many";
}

TEST(QueueOrder, ADeadlineGoesFirstButBuysNoShare) {
  RequestQueue queue({.tenant_weights = {1, 1}});
  // Tenant 1 has been served more: in fair order it comes later, by less than a batch.
  EXPECT_TRUE(Push(queue, {.id = 1, .tenant = 1, .cost = kBatchCost / 2}).ok());
  EXPECT_TRUE(Push(queue, {.id = 2, .tenant = 0}).ok());
  EXPECT_EQ(Ids(queue), (Ordered{1, 2}));
  EXPECT_EQ(TakeNext(queue), 1u);
  EXPECT_TRUE(
      Push(queue, {.id = 3, .tenant = 1, .deadline = kStart + seconds(1), .cost = kBatchCost})
          .ok());
  EXPECT_TRUE(Push(queue, {.id = 4, .tenant = 1, .deadline = kStart + seconds(1)}).ok());
  EXPECT_EQ(Ids(queue), (Ordered{3, 2, 4})) << "ahead by a batch at most";
  queue.TakeAll();
  const std::vector<int> taken =
      ServeBacklog(queue, {{.tenant = 0}, {.tenant = 1, .deadline = kStart + seconds(1)}}, 100);
  EXPECT_NEAR(taken[0], 50, 1);
}

TEST(QueueOrder, TheEarlierDeadlineOfTwoTenantsGoesFirst) {
  RequestQueue queue({.tenant_weights = {1, 1}});
  EXPECT_TRUE(Push(queue, {.id = 1, .tenant = 0, .deadline = kStart + milliseconds(9)}).ok());
  EXPECT_TRUE(Push(queue, {.id = 2, .tenant = 1, .deadline = kStart + milliseconds(8)}).ok());
  EXPECT_EQ(Ids(queue), (Ordered{2, 1}));
}

TEST(QueueOrder, AReturningTenantHasAccumulatedNoShare) {
  constexpr int64_t kCost = kBatchCost / 16;  // a small fraction of a batch
  RequestQueue queue({.tenant_weights = {1, 1}});
  for (uint64_t id = 1; id <= 60; ++id) EXPECT_TRUE(Push(queue, {.id = id, .cost = kCost}).ok());
  for (int i = 0; i < 40; ++i) EXPECT_LE(TakeNext(queue), 60u);
  for (uint64_t id = 101; id <= 120; ++id) {
    EXPECT_TRUE(Push(queue, {.id = id, .tenant = 1, .cost = kCost}).ok());
  }
  int returned = 0;
  for (int i = 0; i < 10; ++i) returned += TakeNext(queue) > 100;
  EXPECT_GE(returned, 5);
  EXPECT_LE(returned, 6);
}

TEST(QueueOrder, RequestsThatNeverStartAreNotCharged) {
  RequestQueue queue({.tenant_weights = {1, 1}});
  EXPECT_TRUE(Push(queue, {.id = 1, .tenant = 1}).ok());  // keeps the priority from becoming empty
  for (uint64_t id = 10; id < 20; ++id) EXPECT_TRUE(Push(queue, {.id = id, .tenant = 0}).ok());
  for (uint64_t id = 10; id < 15; ++id) EXPECT_NE(queue.TakeById(id), nullptr);
  for (uint64_t id = 20; id < 30; ++id) {
    EXPECT_TRUE(Push(queue, {.id = id, .tenant = 0, .deadline = kStart + milliseconds(1)}).ok());
  }
  EXPECT_EQ(queue.TakeHopeless(kStart + milliseconds(1)).size(), 10u);
  for (uint64_t id = 2; id < 6; ++id) EXPECT_TRUE(Push(queue, {.id = id, .tenant = 1}).ok());
  EXPECT_EQ(Ids(queue), (Ordered{1, 15, 16, 2, 17, 3, 18, 4, 19, 5}));
}

TEST(QueueOrder, EachPriorityIsAccountedSeparately) {
  RequestQueue queue({.tenant_weights = {1, 1}});
  for (uint64_t id = 1; id <= 20; ++id) {
    EXPECT_TRUE(Push(queue, {.id = id, .tenant = 0, .priority = 1}).ok());
  }
  EXPECT_TRUE(Push(queue, {.id = 31, .tenant = 0}).ok());
  EXPECT_TRUE(Push(queue, {.id = 32, .tenant = 1}).ok());
  EXPECT_TRUE(Push(queue, {.id = 33, .tenant = 0}).ok());
  for (uint64_t id = 1; id <= 20; ++id) EXPECT_EQ(TakeNext(queue), id);
  EXPECT_EQ(Ids(queue), (Ordered{31, 32, 33}));
}

TEST(QueueOrder, LargeRequestsArePassedWhileNoLaneMayTakeThem) {
  RequestQueue queue({.tenant_weights = {1, 1}});
  EXPECT_TRUE(Push(queue, {.id = 1, .tenant = 0, .large = true}).ok());
  EXPECT_TRUE(Push(queue, {.id = 2, .tenant = 1, .priority = 1, .large = true}).ok());
  EXPECT_TRUE(Push(queue, {.id = 3, .tenant = 0}).ok());
  EXPECT_EQ(Ids(queue), (Ordered{2, 1, 3}));
  EXPECT_EQ(TakeNext(queue, kStart, /*large_allowed=*/false), 3u);
  EXPECT_EQ(TakeNext(queue, kStart, /*large_allowed=*/false), 0u);
  EXPECT_EQ(TakeNext(queue), 2u);
}

TEST(QueueOrder, EveryFourthBatchServesPrioritiesThatWaitTooLong) {
  RequestQueue queue({.tenant_weights = {1}, .aging = kAging});
  for (uint64_t id = 1; id <= 40; ++id) EXPECT_TRUE(Push(queue, {.id = id, .priority = 9}).ok());
  EXPECT_TRUE(Push(queue, {.id = 101, .priority = 1}).ok());
  EXPECT_TRUE(Push(queue, {.id = 102, .priority = 1}).ok());
  EXPECT_TRUE(Push(queue, {.id = 201, .priority = 0}).ok());
  EXPECT_TRUE(Push(queue, {.id = 202, .priority = 0}).ok());
  const auto take = [&](TimePoint now, int count) {
    Ordered ids;
    for (int i = 0; i < count; ++i) ids.push_back(TakeNext(queue, now));
    return ids;
  };
  EXPECT_EQ(take(kStart + kAging - milliseconds(1), 5), (Ordered{1, 2, 3, 4, 5}));
  // Among the starved priorities, the one that was served longest ago.
  EXPECT_EQ(take(kStart + kAging, 14),
            (Ordered{101, 6, 7, 8, 201, 9, 10, 11, 102, 12, 13, 14, 202, 15}));
}

TEST(QueueOrder, AnAgedRequestLeadsABatchAndTheRestKeepsItsOrder) {
  RequestQueue queue({.tenant_weights = {1, 1}, .aging = kAging});
  for (uint64_t id = 1; id <= 3; ++id) EXPECT_TRUE(Push(queue, {.id = id, .priority = 9}).ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Push(queue, {.id = 50, .priority = 9}).ok());
    EXPECT_EQ(queue.TakeBatch({{50, 0}}, false).size(), 1u);
  }
  EXPECT_TRUE(Push(queue, {.id = 11, .tenant = 0}).ok());
  EXPECT_TRUE(Push(queue, {.id = 12, .tenant = 0}).ok());
  EXPECT_TRUE(Push(queue, {.id = 13, .tenant = 1}).ok());
  EXPECT_EQ(Ids(queue, kStart + kAging), (Ordered{11, 1, 2, 3, 13, 12}));
}

TEST(QueueOrder, ALateQueueStillServesAgedRequestsFirst) {
  RequestQueue queue({.tenant_weights = {1}, .aging = milliseconds(50)});
  const auto at = [](int ms) { return kStart + milliseconds(ms); };
  ASSERT_TRUE(Push(queue, {.id = 1, .deadline = at(1000)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 2, .deadline = at(10)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 3, .enqueued = at(5), .deadline = at(54)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 4, .enqueued = at(6), .deadline = at(53)}).ok());
  EXPECT_EQ(queue.TakeHopeless(at(10)).size(), 1u);
  EXPECT_EQ(Ids(queue, at(10)), (Ordered{4, 3, 1}));
  EXPECT_EQ(Ids(queue, at(50)), (Ordered{1, 4, 3})) << "1 has waited for as long as anything does";
  EXPECT_EQ(TakeNext(queue, at(10)), 4u);
  EXPECT_EQ(TakeNext(queue, at(10)), 3u);
  ASSERT_TRUE(Push(queue, {.id = 5, .enqueued = at(11), .deadline = at(60)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 6, .enqueued = at(11), .deadline = at(61)}).ok());
  EXPECT_EQ(Ids(queue, at(11)), (Ordered{1, 5, 6})) << "1 does not keep the line late";
}

TEST(QueueOrder, ATriedRequestThatIsLateDoesNotChangeTheOrder) {
  RequestQueue queue({.tenant_weights = {1}, .aging = milliseconds(50)});
  const auto due = [](int ms) { return kStart + milliseconds(ms); };
  ASSERT_TRUE(Push(queue, {.id = 1, .deadline = due(30)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 2, .enqueued = due(5), .deadline = due(40)}).ok());
  const auto late = MakeRequest({.id = 3, .deadline = due(10)});
  late->tried = true;
  queue.NoteLate(*late);
  EXPECT_EQ(Ids(queue, due(10)), (Ordered{1, 2}));
  late->tried = false;
  queue.NoteLate(*late);
  EXPECT_EQ(Ids(queue, due(10)), (Ordered{2, 1}));
}

TEST(QueueOrder, ALateQueueIsServedNewestFirst) {
  RequestQueue queue({.tenant_weights = {1, 1}, .aging = milliseconds(50)});
  const auto due = [](int ms) { return kStart + milliseconds(ms); };
  ASSERT_TRUE(Push(queue, {.id = 1, .deadline = due(10)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 2, .deadline = due(40), .large = true}).ok());
  ASSERT_TRUE(Push(queue, {.id = 3}).ok());
  ASSERT_TRUE(Push(queue, {.id = 4, .enqueued = due(5), .deadline = due(30)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 5, .enqueued = due(5)}).ok());
  EXPECT_EQ(Ids(queue), (std::vector<uint64_t>{1, 4, 2, 3, 5}));
  EXPECT_EQ(queue.TakeHopeless(due(10)).size(), 1u);
  EXPECT_EQ(Ids(queue, due(10)), (std::vector<uint64_t>{4, 2, 3, 5}));
  EXPECT_EQ(Ids(queue, due(50)), (std::vector<uint64_t>{3, 4, 2, 5}))
      << "3 has no deadline, is due";
  EXPECT_EQ(TakeNext(queue, due(10), /*large_allowed=*/false), 4u);
  EXPECT_EQ(TakeNext(queue, due(10)), 2u);
  ASSERT_TRUE(Push(queue, {.id = 6, .enqueued = due(10), .deadline = due(90)}).ok());
  ASSERT_TRUE(Push(queue, {.id = 7, .enqueued = due(10), .deadline = due(95)}).ok());
  EXPECT_EQ(Ids(queue, due(10)), (std::vector<uint64_t>{3, 5, 6, 7})) << "it was late";
}

}  // namespace
}  // namespace attend::test
