// SPDX-License-Identifier: Apache-2.0
//
// Decides what runs next. Pure: from the queue, the time and the lanes' state it returns what to
// take or when to ask again; it owns no thread and changes nothing.
//
// Work-conserving: a free lane takes waiting requests, in QueueOrder, up to a budget of requests,
// cost and bytes. There is no artificial delay unless one is configured. A request above the budget
// of cost or bytes is large. So is one that its device computes in parts or that begins by waiting,
// because the rest of its batch would wait too. A large request runs alone, and never on the last
// free lane of several: that is left to small ones, which thus wait for at most one bounded batch.
// The problems of a batch may differ in everything: the device groups them into launches.
//
// A request that could not end before its deadline, beside what runs, is not started, and none that
// would make what is about to run late, or what runs of the same tenant (Outlook::Spares).

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/util/clock.h"
#include "server/schedule/outlook.h"
#include "server/schedule/queue_order.h"
#include "server/schedule/request_queue.h"

namespace attend {

struct BatcherOptions {
  int64_t batch_requests_max = 64;
  double batch_flops_max = 2e9;  // of kernel cost (kernels/contract/cost.h)
  int64_t batch_bytes_max = int64_t{64} << 20;
  Duration batch_delay{0};  // how long to wait for more requests although a lane is free
};

struct LaneState {
  int total = 1;
  int free = 1;
  int large = 0;  // lanes that are running a large request
};

// Why a batch took no more.
enum class BatchClosed {
  kEmpty = 0,  // it took all that waited for the free lane
  kDelay,      // the same, once batch_delay had passed
  kRequests,   // a budget was full
  kFlops,
  kBytes,
  kLarge,      // a large request came next, or the batch is one
  kDeadlines,  // one more would have made it late
};
inline constexpr int kBatchClosedCount = 7;

struct BatchDecision {
  std::vector<QueuePick> take;  // empty: take nothing now
  std::vector<uint64_t> late;   // cannot be in time any more, and must not start
  bool large = false;           // the batch is one large request
  bool aged = false;            // QueueOrder's rule 5 chose the first
  BatchClosed closed = BatchClosed::kEmpty;
  TimePoint wake = kNever;  // when to ask again if nothing happens before
  TimePoint delayed{};      // until then what waits does so for company
};

class Batcher {
 public:
  explicit Batcher(const BatcherOptions& options) : options_(options) {}

  BatchDecision Next(const RequestQueue& queue, const LaneState& lanes, const Outlook& outlook,
                     TimePoint now) const;

  // Whether it is large by its size; one that runs in parts is large whatever its size.
  bool IsLarge(double kernel_cost, int64_t bytes) const {
    return kernel_cost > options_.batch_flops_max || bytes > options_.batch_bytes_max;
  }
  // What a tenant is charged: the larger of the request's shares of a batch's kernel cost and
  // bytes, in units of kBatchCost, within [kCostMin, kCostMax].
  int64_t Cost(double kernel_cost, int64_t bytes) const;

 private:
  void Fill(QueueOrder& order, const Outlook& outlook, BatchDecision& decision,
            TimePoint& until) const;

  BatcherOptions options_;
};

}  // namespace attend
