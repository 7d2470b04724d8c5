// SPDX-License-Identifier: Apache-2.0
//
// Requests for tests of the queue and its readers.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/schedule/queue_order.h"
#include "server/schedule/request_queue.h"

namespace attend::test {

inline const TimePoint kStart{std::chrono::seconds(1000)};

struct RequestSpec {
  uint64_t id = 0;
  int tenant = 0;
  int32_t priority = 0;
  TimePoint enqueued = kStart;
  TimePoint deadline = kNever;
  double flops = 10;
  int64_t cost = kBatchCost;
  bool large = false;
};

inline std::unique_ptr<Request> MakeRequest(const RequestSpec& spec) {
  auto request = std::make_unique<Request>();
  request->id = spec.id;
  request->tenant = spec.tenant;
  request->priority = spec.priority;
  request->enqueued = spec.enqueued;
  request->deadline = spec.deadline;
  request->flops = request->kernel_cost = spec.flops;
  request->cost = spec.cost;
  request->large = spec.large;
  return request;
}

// Checks the contract of Push at every push of a test.
inline Status Push(RequestQueue& queue, const RequestSpec& spec) {
  auto request = MakeRequest(spec);
  const int64_t before = queue.size();
  const Status status = queue.Push(request);
  EXPECT_EQ(status.ok(), request == nullptr) << "taken if and only if OK";
  EXPECT_EQ(queue.size(), before + (status.ok() ? 1 : 0));
  return status;
}

// Takes the next request in order, as a batch of its own; 0 if none may start.
inline uint64_t TakeNext(RequestQueue& queue, TimePoint now = kStart, bool large_allowed = true) {
  QueueOrder order(queue, large_allowed, now);
  if (order.Peek() == nullptr) return 0;
  const QueuePick pick = order.Take();
  return queue.TakeBatch({pick}, order.aged()).front()->id;
}

// All waiting requests, in the order in which one batch would take them.
inline std::vector<uint64_t> Ids(const RequestQueue& queue, TimePoint now = kStart) {
  std::vector<uint64_t> ids;
  for (QueueOrder order(queue, true, now); order.Peek() != nullptr;) ids.push_back(order.Take().id);
  return ids;
}

}  // namespace attend::test
