// SPDX-License-Identifier: Apache-2.0

#include "server/request_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

namespace attend {
namespace {

using std::chrono::milliseconds;

const TimePoint kStart{std::chrono::seconds(1000)};

std::unique_ptr<Request> MakeRequest(uint64_t id, int32_t priority = 0,
                                     TimePoint deadline = kNever) {
  auto request = std::make_unique<Request>();
  request->id = id;
  request->priority = priority;
  request->deadline = deadline;
  request->flops = 10.0;
  return request;
}

// The contract of Push, checked wherever a test pushes.
Status Push(RequestQueue& queue, std::unique_ptr<Request> request) {
  const int64_t before = queue.size();
  const Status status = queue.Push(request);
  EXPECT_EQ(status.ok(), request == nullptr) << "taken if and only if OK";
  EXPECT_EQ(queue.size(), before + (status.ok() ? 1 : 0));
  return status;
}

std::vector<uint64_t> Ids(const RequestQueue& queue) {
  std::vector<uint64_t> ids;
  for (const auto& [key, request] : queue.ordered()) ids.push_back(request->id);
  return ids;
}

TEST(RequestQueue, OrdersByPriorityThenDeadlineThenArrival) {
  RequestQueue queue(10);
  EXPECT_TRUE(Push(queue, MakeRequest(1)).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(2, 0, kStart + milliseconds(9))).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(3, 5)).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(4, 0, kStart + milliseconds(3))).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(5, -5, kStart)).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(6)).ok());
  EXPECT_EQ(Ids(queue), (std::vector<uint64_t>{3, 4, 2, 1, 6, 5}));
}

TEST(RequestQueue, RefusesWhenFullAndNamesTheBound) {
  RequestQueue queue(2);
  EXPECT_TRUE(Push(queue, MakeRequest(1)).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(2)).ok());
  const Status refused = Push(queue, MakeRequest(3));
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("2"), std::string::npos);
  EXPECT_EQ(Ids(queue), (std::vector<uint64_t>{1, 2}));
  EXPECT_DOUBLE_EQ(queue.flops(), 20.0);
  queue.TakeById(1);
  EXPECT_TRUE(Push(queue, MakeRequest(3)).ok());
}

TEST(RequestQueue, ExpiresAtTheDeadlineAndNotBefore) {
  RequestQueue queue(10);
  EXPECT_TRUE(Push(queue, MakeRequest(1, 9, kStart + milliseconds(5))).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(2, 0, kStart + milliseconds(2))).ok());
  EXPECT_TRUE(Push(queue, MakeRequest(3)).ok());
  EXPECT_EQ(queue.earliest_deadline(), kStart + milliseconds(2));
  EXPECT_TRUE(queue.TakeExpired(kStart + milliseconds(2) - std::chrono::nanoseconds(1)).empty());
  const auto expired = queue.TakeExpired(kStart + milliseconds(5));
  ASSERT_EQ(expired.size(), 2u);
  EXPECT_EQ(expired[0]->id, 2u);
  EXPECT_EQ(expired[1]->id, 1u);
  EXPECT_EQ(queue.earliest_deadline(), kNever);
  EXPECT_EQ(Ids(queue), (std::vector<uint64_t>{3}));
}

TEST(RequestQueue, TakeByIdFindsOnlyWhatWaits) {
  RequestQueue queue(10);
  EXPECT_TRUE(Push(queue, MakeRequest(1)).ok());
  EXPECT_EQ(queue.TakeById(2), nullptr);
  EXPECT_NE(queue.TakeById(1), nullptr);
  EXPECT_EQ(queue.TakeById(1), nullptr);
  EXPECT_TRUE(queue.empty());
  EXPECT_DOUBLE_EQ(queue.flops(), 0.0);
}

// Random operations against a plain vector that is sorted when looked at.
TEST(RequestQueue, AgreesWithAPlainModel) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  RequestQueue queue(40);
  struct Item {
    int32_t negated_priority;
    TimePoint deadline;
    uint64_t id;
  };
  std::vector<Item> model;
  const auto order = [](const Item& a, const Item& b) {
    return std::tie(a.negated_priority, a.deadline, a.id) <
           std::tie(b.negated_priority, b.deadline, b.id);
  };
  TimePoint now = kStart;
  for (uint64_t id = 1; id < 5000; ++id) {
    now += milliseconds(random() % 3);
    switch (random() % 4) {
      case 0:
      case 1: {
        const int32_t priority = static_cast<int32_t>(random() % 3);
        const TimePoint deadline = random() % 2 ? kNever : now + milliseconds(random() % 60);
        const bool taken = Push(queue, MakeRequest(id, priority, deadline)).ok();
        EXPECT_EQ(taken, model.size() < 40);
        if (taken) model.push_back({-priority, deadline, id});
        break;
      }
      case 2: {
        const size_t expired =
            std::erase_if(model, [&](const Item& i) { return i.deadline <= now; });
        EXPECT_EQ(queue.TakeExpired(now).size(), expired);
        break;
      }
      default:
        if (!model.empty()) {
          const uint64_t victim = model[random() % model.size()].id;
          EXPECT_NE(queue.TakeById(victim), nullptr);
          std::erase_if(model, [&](const Item& i) { return i.id == victim; });
        }
    }
    std::sort(model.begin(), model.end(), order);
    std::vector<uint64_t> expected;
    for (const Item& item : model) expected.push_back(item.id);
    ASSERT_EQ(Ids(queue), expected);
  }
}

}  // namespace
}  // namespace attend
