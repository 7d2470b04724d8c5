// SPDX-License-Identifier: Apache-2.0
//
// What one device does next: its queue, the state of its lanes, and the plan that moves requests
// from the queue to the lanes and stops those that run past their deadline. It has no thread, clock
// or device of its own: the device worker drives it with the time and real lanes, a simulation with
// simulated ones.
//
// It learns how long requests take (estimator.h), and does not run what would be late: such a
// request is refused when it comes, by what waits and runs, or ended while it waits. Either way it
// has Refusal::late and RESOURCE_EXHAUSTED, since elsewhere, or later, one like it might be in
// time; or DEADLINE_EXCEEDED if it could not be in time even alone.
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
#include "server/schedule/estimator.h"
#include "server/schedule/outlook.h"
#include "server/schedule/request_queue.h"

namespace attend {

struct SchedulerOptions {
  int lanes = 1;
  QueueOptions queue;
  BatcherOptions batcher;
  double cost_per_s = 0;  // Estimator's
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
    // With their status: they were too late, or would have been.
    std::vector<std::unique_ptr<Request>> ended;
    std::vector<Launch> launches;
    TimePoint wake = kNever;  // when to plan again, if nothing happens before

    bool empty() const { return ended.empty() && launches.empty(); }
  };

  explicit Scheduler(const SchedulerOptions& options);

  // Whether the request, whose selection, kernel_cost, batch_bytes and in_parts are set, would be
  // in time if it were pushed now, or is to be tried; if not, the status that it is refused with,
  // which is in the request's refusal too.
  Status Judge(Request& request, TimePoint now);
  // Takes `request`, with the same fields set, if and only if OK. RESOURCE_EXHAUSTED when the queue
  // is full, Judge's status, or Close's. Plan should follow.
  Status Push(std::unique_ptr<Request>& request, TimePoint now);
  // Takes the request out of the queue, with its status CANCELLED or DEADLINE_EXCEEDED; null if it
  // is not queued. If it is running, it is told to stop. One that has a planner, and for which no
  // plan was made yet, is as if it had never been queued.
  std::unique_ptr<Request> Cancel(uint64_t id, TimePoint now);
  // Another thread is about to call Plan for what is queued.
  void WillPlan(TimePoint now) { planned_ = now; }
  // Ends queued requests past their deadline, tells running ones past theirs to stop, and fills the
  // free lanes.
  Step Plan(TimePoint now);
  // The launch on this lane has ended, and its requests are about to be destroyed.
  void LaneEnded(int lane, BatchEnd end, TimePoint now);
  // The lane is free. Plan should follow.
  void LaneDone(int lane);
  // Tells all running requests to stop.
  void StopAll(Code code);
  // The earliest deadline of running requests that were not told to stop; kNever if none.
  TimePoint running_deadline() const;
  // Refuses requests with `status` from now on, and returns the queued ones, which end with it too.
  // Running ones continue. Only the first call's status counts.
  std::vector<std::unique_ptr<Request>> Close(const Status& status);

  // How long the device is expected to need for all that waits and runs.
  Duration Backlog(TimePoint now);
  LaneState lanes() const;
  std::vector<const Request*> running() const;
  const RequestQueue& queue() const { return queue_; }

 private:
  struct LaneSlot {
    bool busy = false;
    bool large = false;
    std::vector<Request*> running;  // until LaneEnded
    TimePoint deadline = kNever;    // the earliest of theirs, except stopped ones
    int tenant = 0;                 // Outlook::Running's
    int32_t priority = 0;           // likewise
    Duration expected{0};           // device time
    Duration had{0};                // of it
  };

  void StopExpired(LaneSlot& slot, TimePoint now);
  // Shares the device's time since the last call among the lanes that were busy; if none was and
  // something waited, but not for company, it is the next one's.
  void ShareTime(TimePoint now);
  // Valid until a lane's state changes.
  Outlook OutlookAt(TimePoint now);
  void Classify(Request& request) const;
  void StartLaunch(const BatchDecision& decision, TimePoint now, Step* step);
  void EndLate(std::unique_ptr<Request> request, TimePoint now, Step* step);

  const Batcher batcher_;
  RequestQueue queue_;
  std::vector<LaneSlot> lanes_;
  Estimator estimator_;
  std::vector<Outlook::Running> running_;  // OutlookAt's
  TimePoint shared_until_{};               // ShareTime's
  Duration idle_{0};                       // while something waited, since the last launch
  TimePoint delayed_{};                    // BatchDecision's
  TimePoint planned_{};                    // when Plan or WillPlan was called last
  Status closed_;                          // OK: open
};

}  // namespace attend
