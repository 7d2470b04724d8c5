// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/check_queue.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::milliseconds;

void Push(CheckQueue& queue, const RequestSpec& spec) {
  auto request = MakeRequest(spec);
  queue.Push(request, spec.cost);
  EXPECT_EQ(request, nullptr);
}

TEST(CheckQueue, TenantsShareByWeightAndCostHoweverManyChecksWait) {
  CheckQueue queue({1, 3});
  uint64_t id = 0;
  for (int n = 0; n < 40; ++n) Push(queue, {.id = ++id, .tenant = 0});
  for (int n = 0; n < 12; ++n) Push(queue, {.id = ++id, .tenant = 1});
  std::map<int, int> taken;
  for (int n = 0; n < 16; ++n) ++taken[queue.TakeNext()->tenant];
  EXPECT_EQ(taken[0], 4);
  EXPECT_EQ(taken[1], 12);
  // Cheap checks: proportionally more of them.
  for (int n = 0; n < 40; ++n) Push(queue, {.id = ++id, .tenant = 1, .cost = kBatchCost / 4});
  taken.clear();
  for (int n = 0; n < 26; ++n) ++taken[queue.TakeNext()->tenant];
  EXPECT_EQ(taken[0], 2);
}

TEST(CheckQueue, ATenantsChecksKeepTheirOrder) {
  CheckQueue queue({1});
  for (uint64_t id = 1; id <= 3; ++id) Push(queue, {.id = id});
  EXPECT_EQ(queue.TakeById(2)->id, 2u);
  EXPECT_EQ(queue.TakeById(2), nullptr);
  EXPECT_EQ(queue.TakeNext()->id, 1u);
  EXPECT_EQ(queue.TakeNext()->id, 3u);
  EXPECT_EQ(queue.TakeNext(), nullptr);
  EXPECT_TRUE(queue.empty());
}

TEST(CheckQueue, ExpiresChecksAtTheirDeadline) {
  CheckQueue queue({1, 1});
  EXPECT_EQ(queue.earliest_deadline(), kNever);
  Push(queue, {.id = 1});
  Push(queue, {.id = 2, .tenant = 1, .deadline = kStart + milliseconds(5)});
  Push(queue, {.id = 3, .deadline = kStart + milliseconds(7)});
  EXPECT_EQ(queue.earliest_deadline(), kStart + milliseconds(5));
  EXPECT_EQ(queue.TakeExpired(kStart + milliseconds(4)), nullptr);
  EXPECT_EQ(queue.TakeExpired(kStart + milliseconds(5))->id, 2u);
  EXPECT_EQ(queue.TakeExpired(kStart + milliseconds(5)), nullptr);
  EXPECT_EQ(queue.earliest_deadline(), kStart + milliseconds(7));
  EXPECT_EQ(queue.TakeAny()->id, 1u);
  EXPECT_EQ(queue.TakeAny()->id, 3u);
  EXPECT_EQ(queue.TakeAny(), nullptr);
}

}  // namespace
}  // namespace attend::test
