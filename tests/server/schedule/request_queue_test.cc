// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/request_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "tests/kernels/support/problems.h"
#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::milliseconds;

TEST(RequestQueue, RefusesWhenFullAndNamesTheBound) {
  RequestQueue queue({.capacity = 2, .tenant_weights = {1}});
  EXPECT_TRUE(Push(queue, {.id = 1}).ok());
  EXPECT_TRUE(Push(queue, {.id = 2}).ok());
  auto third = MakeRequest({.id = 3});
  const Status refused = queue.Push(third);
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(third->enqueued, TimePoint()) << "it never was in the queue";
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("2"), std::string::npos);
  EXPECT_EQ(Ids(queue), (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(queue.size(), 2);
  queue.TakeById(1);
  EXPECT_TRUE(Push(queue, {.id = 3}).ok());
}

TEST(RequestQueue, ExpiresRequestsExactlyAtTheDeadline) {
  RequestQueue queue({.tenant_weights = {1}});
  EXPECT_TRUE(Push(queue, {.id = 1, .priority = 9, .deadline = kStart + milliseconds(5)}).ok());
  EXPECT_TRUE(Push(queue, {.id = 2, .deadline = kStart + milliseconds(2)}).ok());
  EXPECT_TRUE(Push(queue, {.id = 3, .deadline = kStart + milliseconds(2), .large = true}).ok());
  EXPECT_TRUE(Push(queue, {.id = 4}).ok());
  EXPECT_EQ(queue.earliest_hopeless(), kStart + milliseconds(2));
  EXPECT_TRUE(queue.TakeHopeless(kStart + milliseconds(2) - std::chrono::nanoseconds(1)).empty());
  const auto expired = queue.TakeHopeless(kStart + milliseconds(5));
  ASSERT_EQ(expired.size(), 3u);
  EXPECT_EQ(expired[0]->id, 2u);
  EXPECT_EQ(expired[1]->id, 3u);
  EXPECT_EQ(expired[2]->id, 1u);
  EXPECT_EQ(queue.earliest_hopeless(), kNever);
  EXPECT_EQ(Ids(queue), (std::vector<uint64_t>{4}));
}

TEST(RequestQueue, TakeByIdFindsOnlyWaitingRequests) {
  RequestQueue queue({.tenant_weights = {1}});
  EXPECT_TRUE(Push(queue, {.id = 1}).ok());
  EXPECT_EQ(queue.TakeById(2), nullptr);
  EXPECT_NE(queue.TakeById(1), nullptr);
  EXPECT_EQ(queue.TakeById(1), nullptr);
  EXPECT_TRUE(queue.empty());
}

TEST(RequestQueue, CountsByTenantAndTakesAllInArrivalOrder) {
  RequestQueue queue({.tenant_weights = {1, 2}});
  for (uint64_t id = 1; id <= 5; ++id) {
    EXPECT_TRUE(Push(queue, {.id = id,
                             .tenant = static_cast<int>(id % 2),
                             .priority = static_cast<int32_t>(id),
                             .large = id == 3})
                    .ok());
  }
  EXPECT_EQ(queue.tenant_size(0), 2);
  EXPECT_EQ(queue.tenant_size(1), 3);
  const auto all = queue.TakeAll();
  ASSERT_EQ(all.size(), 5u);
  for (uint64_t id = 1; id <= 5; ++id) EXPECT_EQ(all[id - 1]->id, id);
  EXPECT_EQ(queue.tenant_size(0) + queue.tenant_size(1), 0);
}

// One tenant's requests in a plain vector, sorted when read.
struct PlainModel {
  struct Item {
    int32_t negated_priority;
    TimePoint due;
    uint64_t id;
    TimePoint deadline;
  };

  auto Rank(const Item& item) {
    const bool is_late = !late[item.negated_priority].empty();
    const bool newest_first = item.due == item.deadline && is_late;
    return std::tuple(item.negated_priority, is_late && !newest_first,
                      newest_first ? TimePoint() : item.due,
                      newest_first ? UINT64_MAX - item.id : item.id);
  }
  void Remove(uint64_t id) {
    for (auto& [priority, ids] : late) ids.erase(id);
    std::erase_if(items, [&](const Item& i) { return i.id == id; });
  }
  void Expire(const Item& item) {
    Remove(item.id);
    if (!late[item.negated_priority].empty()) return;
    for (const Item& each : items) {
      if (each.negated_priority == item.negated_priority && each.due == each.deadline) {
        late[item.negated_priority].insert(each.id);
      }
    }
  }
  std::vector<Item> Expired(TimePoint now) const {
    std::vector<Item> expired;
    std::copy_if(items.begin(), items.end(), std::back_inserter(expired),
                 [&](const Item& i) { return i.deadline <= now; });
    std::sort(expired.begin(), expired.end(), [](const Item& a, const Item& b) {
      return std::tie(a.deadline, a.id) < std::tie(b.deadline, b.id);
    });
    return expired;
  }
  std::vector<uint64_t> Ids() {
    std::sort(items.begin(), items.end(),
              [&](const Item& a, const Item& b) { return Rank(a) < Rank(b); });
    std::vector<uint64_t> ids;
    for (const Item& item : items) ids.push_back(item.id);
    return ids;
  }

  std::vector<Item> items;
  std::map<int32_t, std::set<uint64_t>> late;  // keeps the queue late; keyed by negated priority
};

TEST(RequestQueue, AgreesWithAModel) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr Duration kAging = milliseconds(30);
  RequestQueue queue({.capacity = 40, .tenant_weights = {1}, .aging = kAging});
  PlainModel model;
  TimePoint now = kStart;
  for (uint64_t id = 1; id < 5000; ++id) {
    now += milliseconds(random() % 3);
    switch (random() % 4) {
      case 0:
      case 1: {
        const int32_t priority = static_cast<int32_t>(random() % 3);
        const TimePoint deadline = random() % 2 ? kNever : now + milliseconds(random() % 60);
        const bool large = random() % 4 == 0;
        const bool taken = Push(queue, {.id = id,
                                        .priority = priority,
                                        .enqueued = now,
                                        .deadline = deadline,
                                        .large = large})
                               .ok();
        EXPECT_EQ(taken, model.items.size() < 40);
        if (taken) {
          model.items.push_back({-priority, std::min(deadline, now + kAging), id, deadline});
        }
        break;
      }
      case 2: {
        const std::vector<PlainModel::Item> expired = model.Expired(now);
        EXPECT_EQ(queue.TakeHopeless(now).size(), expired.size());
        for (const PlainModel::Item& item : expired) model.Expire(item);
        break;
      }
      default:
        if (!model.items.empty()) {
          const uint64_t victim = model.items[random() % model.items.size()].id;
          EXPECT_NE(queue.TakeById(victim), nullptr);
          model.Remove(victim);
        }
    }
    ASSERT_EQ(Ids(queue, kStart), model.Ids());
  }
}

}  // namespace
}  // namespace attend::test
