// SPDX-License-Identifier: Apache-2.0
//
// Decides what runs next. Pure: given the queue, the time and the lanes' state, it returns the
// requests to take, or when to ask again. It owns no thread and changes nothing.
//
// Work-conserving: a free lane takes waiting requests, in QueueOrder, up to a budget of requests,
// cost and bytes. There is no artificial delay unless one is configured. A request above the cost
// or byte budget is large. So is one that its device computes in parts, or that begins by waiting
// for an event, because the rest of its batch would wait too. A large request runs alone, and never
// on the last free lane of several: that lane is left to small requests, which thus wait for at
// most one bounded batch. The problems of a batch need not have anything in common: the device
// groups them into launches.
//
// A request that cannot finish before its deadline, given what is running, is not started. Neither
// is one that would make the batch being formed late, or a running batch of its own tenant
// (Outlook::Spares).

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
  double batch_flops_max = 2e9;  // kernel cost (kernels/contract/cost.h)
  int64_t batch_bytes_max = int64_t{64} << 20;
  Duration batch_delay{0};  // how long to wait for more requests while a lane is free
};

struct LaneState {
  int total = 1;
  int free = 1;
  int large = 0;  // lanes that are running a large request
};

// Why a batch stopped growing.
enum class BatchClosed {
  kEmpty = 0,  // took everything that was waiting
  kDelay,      // the same, after batch_delay
  kRequests,   // a budget was exhausted, also the next two
  kFlops,
  kBytes,
  kLarge,      // the next request is large, or the batch is one large request
  kDeadlines,  // one more request would have made the batch late
};
inline constexpr int kBatchClosedCount = 7;

struct BatchDecision {
  std::vector<QueuePick> take;  // empty: take nothing now
  std::vector<uint64_t> late;   // can no longer meet their deadlines; must not start
  bool large = false;           // the batch is one large request
  bool aged = false;            // the first request was chosen by rule 5 of QueueOrder
  BatchClosed closed = BatchClosed::kEmpty;
  TimePoint wake = kNever;  // when to ask again if nothing happens first
  TimePoint delayed{};      // set while the batch is held back by batch_delay: until when
};

class Batcher {
 public:
  explicit Batcher(const BatcherOptions& options) : options_(options) {}

  BatchDecision Next(const RequestQueue& queue, const LaneState& lanes, const Outlook& outlook,
                     TimePoint now) const;

  // Whether a request is large by size. One that runs in parts is large whatever its size.
  bool IsLarge(double kernel_cost, int64_t bytes) const {
    return kernel_cost > options_.batch_flops_max || bytes > options_.batch_bytes_max;
  }
  // The charge to the tenant: the larger of the request's shares of a batch's kernel-cost and byte
  // budgets, in units of kBatchCost, within [kCostMin, kCostMax].
  int64_t Cost(double kernel_cost, int64_t bytes) const;

 private:
  void Fill(QueueOrder& order, const Outlook& outlook, BatchDecision& decision,
            TimePoint& until) const;

  BatcherOptions options_;
};

}  // namespace attend
