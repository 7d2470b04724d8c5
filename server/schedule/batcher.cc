// SPDX-License-Identifier: Apache-2.0
//
// A batch is filled in one pass over the queue in QueueOrder. Late requests are skipped and
// reported. While the batch is empty, a tenant whose next request would make one of its running
// batches late is skipped as a whole. The pass stops at a large request (which is taken if the
// batch is empty), and at the first request that exceeds a budget or would make the batch late.
// Invariant: the batch ends before the earliest deadline in it, as far as the estimates hold.

#include "server/schedule/batcher.h"

#include <algorithm>
#include <cmath>

namespace attend {

int64_t Batcher::Cost(double kernel_cost, int64_t bytes) const {
  const double share =
      std::max(kernel_cost / options_.batch_flops_max,
               static_cast<double>(bytes) / static_cast<double>(options_.batch_bytes_max));
  const double cost = std::ceil(share * static_cast<double>(kBatchCost));
  if (!(cost < static_cast<double>(kCostMax))) return kCostMax;  // also catches 0 / 0
  return std::max(kCostMin, static_cast<int64_t>(cost));
}

void Batcher::Fill(QueueOrder& order, const Outlook& outlook, BatchDecision& decision,
                   TimePoint& until) const {
  double kernel_cost = 0;
  int64_t bytes = 0;
  Duration time{0};
  TimePoint due = kNever;  // the earliest deadline in the batch
  while (const Request* request = order.Peek()) {
    if (outlook.End(Duration::zero(), request->expected) > request->deadline) {
      decision.late.push_back(request->id);
      order.Skip();
      continue;
    }
    if (request->large && !decision.take.empty()) {
      decision.closed = BatchClosed::kLarge;
      return;
    }
    const bool spares = outlook.Spares(*request, time + request->expected);
    if (!spares && decision.take.empty()) {
      order.SkipTenant();
      continue;
    }
    if (!spares || outlook.End(time, request->expected) > std::min(due, request->deadline)) {
      decision.closed = BatchClosed::kDeadlines;
      return;
    }
    due = std::min(due, request->deadline);
    if (request->large) {
      decision.closed = BatchClosed::kLarge;
      decision.large = true;
      decision.take.push_back(order.Take());
      return;
    }
    if (static_cast<int64_t>(decision.take.size()) >= options_.batch_requests_max) {
      decision.closed = BatchClosed::kRequests;
      return;
    }
    kernel_cost += request->kernel_cost;
    bytes += request->batch_bytes;
    const bool full = kernel_cost > options_.batch_flops_max;
    if (full || bytes > options_.batch_bytes_max) {
      decision.closed = full ? BatchClosed::kFlops : BatchClosed::kBytes;
      return;
    }
    time += request->expected;
    // A request is held back for at most half of its slack.
    const Duration spare = request->deadline - request->expected - request->enqueued;
    until = std::min(until, request->enqueued + std::min(options_.batch_delay, spare / 2));
    decision.take.push_back(order.Take());
  }
  if (static_cast<int64_t>(decision.take.size()) >= options_.batch_requests_max) {
    decision.closed = BatchClosed::kRequests;
  }
}

BatchDecision Batcher::Next(const RequestQueue& queue, const LaneState& lanes,
                            const Outlook& outlook, TimePoint now) const {
  BatchDecision decision;
  decision.wake = queue.earliest_hopeless();
  if (lanes.free == 0 || queue.empty()) return decision;

  // With a single lane there is none to keep free.
  const bool large_may_run = lanes.total == 1 || lanes.large + 1 < lanes.total;
  QueueOrder order(queue, large_may_run, now);
  TimePoint until = kNever;  // how long the batch may be held back for more requests
  decision.take.reserve(static_cast<size_t>(std::min(queue.size(), options_.batch_requests_max)));
  Fill(order, outlook, decision, until);
  decision.aged = order.aged() && !decision.take.empty();
  const bool waits_for_company = decision.closed == BatchClosed::kEmpty && !decision.take.empty() &&
                                 options_.batch_delay > Duration::zero();
  if (!waits_for_company) return decision;
  if (now >= until) {
    decision.closed = BatchClosed::kDelay;
  } else {
    decision.delayed = until;
    decision.wake = std::min(decision.wake, until);
    decision.take.clear();
    decision.aged = false;
  }
  return decision;
}

}  // namespace attend
