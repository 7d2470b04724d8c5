// SPDX-License-Identifier: Apache-2.0
//
// What one device does next: its queue, the state of its lanes, and the plan that moves requests
// from the queue to the lanes and stops those that run past their deadline. It has no thread, clock
// or device of its own: the device worker drives it with the time and real lanes, a simulation with
// simulated ones.
//
// Not thread-safe: the device worker guards it. Every pushed request comes out exactly once: from
// Plan, in a launch or among the ended; from Cancel; or from Close.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"
#include "server/schedule/request_queue.h"

namespace attend {

struct SchedulerOptions {
  int lanes = 1;
  QueueOptions queue;
  BatcherOptions batcher;
};

class Scheduler {
 public:
  // A batch for a lane that was free and is now busy.
  struct Launch {
    int lane = 0;
    bool large = false;
    bool aged = false;
    BatchClosed closed = BatchClosed::kEmpty;
    double flops = 0;
    std::vector<std::unique_ptr<Request>> requests;
  };
  struct Step {
    std::vector<std::unique_ptr<Request>> ended;  // with their status, DEADLINE_EXCEEDED
    std::vector<Launch> launches;
    TimePoint wake = kNever;  // when to plan again, if nothing happens before

    bool empty() const { return ended.empty() && launches.empty(); }
  };

  explicit Scheduler(const SchedulerOptions& options);

  // Takes `request`, whose kernel_cost, batch_bytes and in_parts are set, if and only if OK.
  // RESOURCE_EXHAUSTED when the queue is full, or Close's status. Plan should follow.
  Status Push(std::unique_ptr<Request>& request, TimePoint now);
  // Takes the request out of the queue, with its status CANCELLED or DEADLINE_EXCEEDED; null if it
  // is not queued. If it is running, it is told to stop.
  std::unique_ptr<Request> Cancel(uint64_t id, TimePoint now);
  // Ends queued requests past their deadline, tells running ones past theirs to stop, and fills the
  // free lanes.
  Step Plan(TimePoint now);
  // The launch on this lane has ended, and its requests are about to be destroyed.
  void LaneEnded(int lane);
  // The lane is free. Plan should follow.
  void LaneDone(int lane);
  // Tells all running requests to stop.
  void StopAll(Code code);
  // The earliest deadline of running requests that were not told to stop; kNever if none.
  TimePoint running_deadline() const;
  // Refuses requests with `status` from now on, and returns the queued ones, which end with it too.
  // Running ones continue. Only the first call's status counts.
  std::vector<std::unique_ptr<Request>> Close(const Status& status);

  LaneState lanes() const;
  std::vector<const Request*> running() const;
  const RequestQueue& queue() const { return queue_; }

 private:
  struct LaneSlot {
    bool busy = false;
    bool large = false;
    std::vector<Request*> running;  // until LaneEnded
    TimePoint deadline = kNever;    // the earliest of theirs, except stopped ones
  };

  void StopExpired(LaneSlot& slot, TimePoint now);

  const Batcher batcher_;
  RequestQueue queue_;
  std::vector<LaneSlot> lanes_;
  Status closed_;  // OK: open
};

}  // namespace attend
