// SPDX-License-Identifier: Apache-2.0
//
// Plan alternates between the batcher and the lanes until the batcher takes nothing more; each
// launch changes the outlook for the next. Time is accounted as device time: ShareTime divides
// every interval evenly among the busy lanes, so the estimator learns times that add up whatever
// ran beside them. Invariant: a lane is busy from StartLaunch to LaneDone, and its requests are
// valid only until LaneEnded.

#include "server/schedule/scheduler.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <string>
#include <utility>

#include "server/util/rejection.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

Status Expired() {
  return Status(Code::kDeadlineExceeded, "the deadline passed while the request was queued");
}

std::string Ms(Duration duration) {
  return std::to_string(std::chrono::ceil<std::chrono::milliseconds>(duration).count());
}

int64_t RetryAfterMs(Duration duration) {
  const int64_t ms = std::chrono::ceil<std::chrono::milliseconds>(duration).count();
  return std::clamp(ms, thresholds::kRetryAfterMsMin, thresholds::kRetryAfterMsMax);
}

// The status of a request that would be done at `end`, which is too late. DEADLINE_EXCEEDED means
// that a retry cannot help: it would come after the deadline, or the request alone takes longer
// than its deadline left on arrival.
Status Late(Request& request, TimePoint now, TimePoint end) {
  const std::string why = "deadline: it is " + Ms(request.deadline - now) +
                          " ms away, but the request would finish in " + Ms(end - now) +
                          " ms, running for " + Ms(request.expected);
  const int64_t retry_after_ms = RetryAfterMs(end - request.deadline);
  if (request.expected > request.deadline - request.received ||
      std::chrono::milliseconds(retry_after_ms) >= request.deadline - now) {
    return Because(Rejection::kLate, Status(Code::kDeadlineExceeded, why));
  }
  request.refusal.retry_after_ms = retry_after_ms;
  return ResourceExhausted(Rejection::kLate, why);
}

// Whether the client gave up at its own deadline, at a point where the answer was at best about to
// come. A client that leaves earlier says nothing about the line.
bool GivenUpLate(const Request& request, TimePoint now) {
  return CancelledLate(request, now) && request.deadline - now <= 2 * request.expected;
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options)
    : batcher_(options.batcher),
      queue_(options.queue),
      lanes_(std::max(1, options.lanes)),
      estimator_(options.cost_per_s) {}

void Scheduler::ShareTime(TimePoint now) {
  const auto busy = std::count_if(lanes_.begin(), lanes_.end(),
                                  [](const LaneSlot& slot) { return !slot.running.empty(); });
  if (busy == 0 && queue_.empty()) idle_ = Duration::zero();
  if (now <= shared_until_) return;
  for (LaneSlot& slot : lanes_) {
    if (!slot.running.empty()) slot.had += (now - shared_until_) / busy;
  }
  // Includes the time until a woken thread runs.
  if (busy == 0 && !queue_.empty()) {
    idle_ += std::max(Duration::zero(), now - std::max(shared_until_, delayed_));
  }
  shared_until_ = now;
}

Outlook Scheduler::OutlookAt(TimePoint now) {
  ShareTime(now);
  running_.clear();
  bool lane_free = false;
  for (const LaneSlot& slot : lanes_) {
    lane_free |= !slot.busy;
    if (slot.running.empty()) continue;
    // A batch that overruns its estimate is not assumed to be about to end.
    running_.push_back({std::max(slot.expected - slot.had, slot.expected / 8), slot.deadline,
                        slot.tenant, slot.priority});
  }
  return Outlook(running_, lane_free, now);
}

void Scheduler::Classify(Request& request) const {
  // A request that waits for an event occupies its lane for as long as the client likes. So it runs
  // alone, and such requests never take all lanes.
  request.large = request.in_parts || batcher_.IsLarge(request.kernel_cost, request.batch_bytes) ||
                  request.source.Awaits();
  request.cost = batcher_.Cost(request.kernel_cost, request.batch_bytes);
  request.tried = false;
  request.expected = estimator_.Expect(request);
}

Status Scheduler::Judge(Request& request, TimePoint now) {
  Classify(request);
  request.refusal.retry_after_ms = 0;  // another device may have set it
  if (request.deadline == kNever) return Status();
  const Duration left = std::min<Duration>(request.deadline - now, std::chrono::hours(24));
  const LaneState state = lanes();
  const Duration before =
      queue_.TimeBefore(request, now, std::max(0, state.total - 1 - state.large), left);
  const Outlook outlook = OutlookAt(now);
  const TimePoint end = outlook.End(before, request.expected);
  if (end <= request.deadline) return Status();
  const bool idle = running_.empty() && queue_.empty();
  if (outlook.End(before, Duration::zero()) <= request.deadline && queue_.tried() == 0 &&
      estimator_.MayTry(request, idle, now)) {
    request.tried = true;
    request.expected = Duration::zero();
    return Status();
  }
  return Late(request, now, end);
}

Status Scheduler::Push(std::unique_ptr<Request>& request, TimePoint now) {
  if (!closed_.ok()) return closed_;
  ShareTime(now);
  ATTEND_RETURN_IF_ERROR(Judge(*request, now));
  request->enqueued = now;
  return queue_.Push(request);
}

std::unique_ptr<Request> Scheduler::Cancel(uint64_t id, TimePoint now) {
  std::unique_ptr<Request> request = queue_.TakeById(id);
  if (request == nullptr) {
    for (const LaneSlot& slot : lanes_) {
      for (Request* const running : slot.running) {
        if (running->id != id) continue;
        StopRunning(*running, CancelCode(*running, now));
        if (GivenUpLate(*running, now)) queue_.NoteLate(*running);
      }
    }
    return nullptr;
  }
  if (GivenUpLate(*request, now)) queue_.NoteLate(*request);
  request->status = CancelCode(*request, now) == Code::kDeadlineExceeded
                        ? Expired()
                        : Status(Code::kCancelled, "cancelled by the client while queued");
  // It arrived and was cancelled in one read, before anything could be planned.
  if (request->planner && request->enqueued > planned_) request->enqueued = TimePoint();
  return request;
}

Scheduler::Step Scheduler::Plan(TimePoint now) {
  planned_ = now;
  Step step;
  for (auto& request : queue_.TakeHopeless(now)) EndLate(std::move(request), now, &step);
  for (LaneSlot& slot : lanes_) {
    if (slot.deadline <= now) StopExpired(slot, now);
  }
  for (;;) {
    const BatchDecision decision = batcher_.Next(queue_, lanes(), OutlookAt(now), now);
    for (const uint64_t id : decision.late) {
      std::unique_ptr<Request> request = queue_.TakeById(id);
      queue_.NoteLate(*request);
      EndLate(std::move(request), now, &step);
    }
    delayed_ = decision.delayed;
    if (decision.take.empty()) {
      step.wake = std::min(decision.wake, running_deadline());
      return step;
    }
    StartLaunch(decision, now, &step);
  }
}

void Scheduler::EndLate(std::unique_ptr<Request> request, TimePoint now, Step* step) {
  if (request->tried) request->expected = estimator_.Expect(*request);
  const TimePoint end = OutlookAt(now).End(Duration::zero(), request->expected);
  request->status = request->deadline <= now ? Expired() : Late(*request, now, end);
  step->ended.push_back(std::move(request));
}

void Scheduler::StartLaunch(const BatchDecision& decision, TimePoint now, Step* step) {
  const auto slot =
      std::find_if(lanes_.begin(), lanes_.end(), [](const LaneSlot& each) { return !each.busy; });
  assert(slot != lanes_.end());
  assert(slot->running.empty() && slot->deadline == kNever);
  assert((!decision.large || decision.take.size() == 1) && "a large request runs alone");
  Launch launch{static_cast<int>(slot - lanes_.begin()),
                decision.large,
                decision.aged,
                decision.closed,
                0,
                queue_.TakeBatch(decision.take, decision.aged)};
  slot->busy = true;
  slot->large = decision.large;
  slot->expected = Duration::zero();
  slot->had = std::exchange(idle_, Duration::zero());
  assert((lanes_.size() == 1 || lanes().large < lanes().total) && "large ones have every lane");
  const Request& head = *launch.requests.front();
  slot->tenant = decision.large ? Outlook::kNoTenant : head.tenant;
  slot->priority = head.priority;
  for (const auto& request : launch.requests) {
    if (request->tenant != slot->tenant) slot->tenant = Outlook::kNoTenant;
    slot->priority = std::min(slot->priority, request->priority);
    launch.flops += request->flops;
    slot->running.push_back(request.get());
    slot->deadline = std::min(slot->deadline, request->deadline);
    slot->expected += request->expected;
    if (!request->tried) continue;
    slot->expected += std::min(estimator_.Expect(*request), request->deadline - now);
    estimator_.Tried(*request, now);
  }
  step->launches.push_back(std::move(launch));
}

void Scheduler::StopExpired(LaneSlot& slot, TimePoint now) {
  slot.deadline = kNever;
  for (Request* const request : slot.running) {
    if (request->deadline <= now) {
      StopRunning(*request, Code::kDeadlineExceeded);
      queue_.NoteLate(*request);
    }
    if (!request->stop.set()) slot.deadline = std::min(slot.deadline, request->deadline);
  }
}

void Scheduler::StopAll(Code code) {
  for (LaneSlot& slot : lanes_) {
    for (Request* const request : slot.running) StopRunning(*request, code);
    slot.deadline = kNever;
  }
}

TimePoint Scheduler::running_deadline() const {
  TimePoint earliest = kNever;
  for (const LaneSlot& slot : lanes_) earliest = std::min(earliest, slot.deadline);
  return earliest;
}

void Scheduler::LaneEnded(int lane, BatchEnd end, TimePoint now) {
  ShareTime(now);
  LaneSlot& slot = lanes_[lane];
  // Time spent waiting for a client's event or an upload is not the request's own.
  const bool awaited = std::any_of(slot.running.begin(), slot.running.end(),
                                   [](const Request* each) { return each->source.Awaits(); });
  if (!awaited) estimator_.Learn(slot.running, end, slot.had, now);
  slot.running.clear();
  slot.deadline = kNever;
}

void Scheduler::LaneDone(int lane) {
  LaneSlot& slot = lanes_[lane];
  assert(slot.busy);
  LaneEnded(lane, BatchEnd::kFailed, shared_until_);
  slot.busy = false;
  const LaneState state = lanes();
  // An empty queue alone is not enough: charges for running requests count when others arrive.
  if (state.free == state.total && queue_.empty()) queue_.ForgetShares();
}

Duration Scheduler::Backlog(TimePoint now) {
  return OutlookAt(now).End(queue_.expected(), Duration::zero()) - now;
}

std::vector<std::unique_ptr<Request>> Scheduler::Close(const Status& status) {
  if (closed_.ok()) closed_ = status;
  std::vector<std::unique_ptr<Request>> ended = queue_.TakeAll();
  for (const auto& request : ended) request->status = status;
  return ended;
}

std::vector<const Request*> Scheduler::running() const {
  std::vector<const Request*> all;
  for (const LaneSlot& slot : lanes_) {
    all.insert(all.end(), slot.running.begin(), slot.running.end());
  }
  return all;
}

LaneState Scheduler::lanes() const {
  LaneState state{static_cast<int>(lanes_.size()), 0, 0};
  for (const LaneSlot& slot : lanes_) {
    if (!slot.busy) ++state.free;
    if (slot.busy && slot.large) ++state.large;
  }
  return state;
}

}  // namespace attend
