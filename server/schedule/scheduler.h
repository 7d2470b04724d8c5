// SPDX-License-Identifier: Apache-2.0
//
// Decides what one device does next. Holds its queue, the state of its lanes, and the plan that
// moves requests from the queue to the lanes and stops those that run past their deadline. It has
// no thread, clock or device of its own: the device worker drives it with real time and lanes, a
// simulation with simulated ones.
//
// It learns how long requests take (estimator.h) and does not run requests that would be late. Such
// a request is refused on arrival, judged by what waits and runs, or ended while it waits. Its
// rejection is kLate. The code is RESOURCE_EXHAUSTED with a retry time, because a retry here or
// elsewhere may succeed, or DEADLINE_EXCEEDED if a retry cannot be in time.
//
// Not thread-safe: guarded by the device worker. Every pushed request comes out exactly once: from
// Plan, in a launch or in `ended`; from Cancel; or from Close.

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
  double cost_per_s = 0;  // for Estimator
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
    // Too late, or would have been; their status is set.
    std::vector<std::unique_ptr<Request>> ended;
    std::vector<Launch> launches;
    TimePoint wake = kNever;  // when to plan again, if nothing happens first

    bool empty() const { return ended.empty() && launches.empty(); }
  };

  explicit Scheduler(const SchedulerOptions& options);

  // Whether the request, whose selection, kernel_cost, batch_bytes and in_parts are set, would be
  // in time if it were pushed now, or may run as a probe. Otherwise returns the status to refuse it
  // with, and sets request.refusal.retry_after_ms if a retry may help.
  Status Judge(Request& request, TimePoint now);
  // Takes `request`, with the same fields set, if and only if OK. Fails with RESOURCE_EXHAUSTED
  // when the queue is full, or with the status of Judge or of Close. Plan should follow.
  Status Push(std::unique_ptr<Request>& request, TimePoint now);
  // Removes the request from the queue with status CANCELLED or DEADLINE_EXCEEDED; null if it is
  // not queued. If it is running, tells it to stop. A request with a planner that has not been
  // planned yet counts as never queued.
  std::unique_ptr<Request> Cancel(uint64_t id, TimePoint now);
  // Another thread is about to call Plan.
  void WillPlan(TimePoint now) { planned_ = now; }
  // Ends queued requests that are or would be late, tells running ones past their deadline to stop,
  // and fills the free lanes.
  Step Plan(TimePoint now);
  // The lane's batch has ended, and its requests are about to be destroyed.
  void LaneEnded(int lane, BatchEnd end, TimePoint now);
  // The lane is free. Plan should follow.
  void LaneDone(int lane);
  // Tells all running requests to stop.
  void StopAll(Code code);
  // The earliest deadline of running requests that were not told to stop; kNever if none.
  TimePoint running_deadline() const;
  // Refuses new requests with `status` and returns the queued ones, which end with it too. Running
  // ones continue. Only the first call's status counts for new requests.
  std::vector<std::unique_ptr<Request>> Close(const Status& status);

  // Expected time until all queued and running work is done.
  Duration Backlog(TimePoint now);
  LaneState lanes() const;
  std::vector<const Request*> running() const;
  const RequestQueue& queue() const { return queue_; }

 private:
  struct LaneSlot {
    bool busy = false;
    bool large = false;
    std::vector<Request*> running;  // cleared by LaneEnded
    TimePoint deadline = kNever;    // the earliest of theirs, without stopped ones
    int tenant = 0;                 // for Outlook::Running
    int32_t priority = 0;           // for Outlook::Running
    Duration expected{0};           // estimated device time
    Duration had{0};                // device time used so far
  };

  void StopExpired(LaneSlot& slot, TimePoint now);
  // Divides the device time since the last call among the busy lanes. If none was busy although
  // requests waited, other than for batch_delay, the time is charged to the next launch.
  void ShareTime(TimePoint now);
  // Valid until a lane changes state.
  Outlook OutlookAt(TimePoint now);
  void Classify(Request& request) const;
  void StartLaunch(const BatchDecision& decision, TimePoint now, Step* step);
  void EndLate(std::unique_ptr<Request> request, TimePoint now, Step* step);

  const Batcher batcher_;
  RequestQueue queue_;
  std::vector<LaneSlot> lanes_;
  Estimator estimator_;
  std::vector<Outlook::Running> running_;  // storage for OutlookAt
  TimePoint shared_until_{};               // up to when ShareTime has divided time
  Duration idle_{0};     // device time lost while requests waited, since the last launch
  TimePoint delayed_{};  // of the last BatchDecision
  TimePoint planned_{};  // the last call of Plan or WillPlan
  Status closed_;        // OK: open
};

}  // namespace attend
