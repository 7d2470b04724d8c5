// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/scheduler.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace attend {
namespace {

Status Expired() {
  return Status(Code::kDeadlineExceeded, "the deadline passed while the request was queued");
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options)
    : batcher_(options.batcher), queue_(options.queue), lanes_(std::max(1, options.lanes)) {}

Status Scheduler::Push(std::unique_ptr<Request>& request, TimePoint now) {
  if (!closed_.ok()) return closed_;
  request->enqueued = now;
  // A request that waits for an event holds its lane; a client's event may take as long as the
  // client likes. So such a request runs alone, and these never take all lanes.
  request->large = request->in_parts ||
                   batcher_.IsLarge(request->kernel_cost, request->batch_bytes) ||
                   request->source.Awaits();
  request->cost = batcher_.Cost(request->kernel_cost, request->batch_bytes);
  return queue_.Push(request);
}

std::unique_ptr<Request> Scheduler::Cancel(uint64_t id, TimePoint now) {
  std::unique_ptr<Request> request = queue_.TakeById(id);
  if (request == nullptr) {
    for (const LaneSlot& slot : lanes_) {
      for (Request* const running : slot.running) {
        if (running->id == id) StopRunning(*running, CancelCode(*running, now));
      }
    }
    return nullptr;
  }
  request->status = CancelCode(*request, now) == Code::kDeadlineExceeded
                        ? Expired()
                        : Status(Code::kCancelled, "cancelled by the client while queued");
  return request;
}

Scheduler::Step Scheduler::Plan(TimePoint now) {
  Step step;
  step.ended = queue_.TakeExpired(now);
  for (const auto& request : step.ended) request->status = Expired();
  for (LaneSlot& slot : lanes_) {
    if (slot.deadline <= now) StopExpired(slot, now);
  }
  for (;;) {
    const BatchDecision decision = batcher_.Next(queue_, lanes(), now);
    if (decision.take.empty()) {
      step.wake = std::min(decision.wake, running_deadline());
      return step;
    }
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
    assert((lanes_.size() == 1 || lanes().large < lanes().total) && "large ones have every lane");
    for (const auto& request : launch.requests) {
      launch.flops += request->flops;
      slot->running.push_back(request.get());
      slot->deadline = std::min(slot->deadline, request->deadline);
    }
    step.launches.push_back(std::move(launch));
  }
}

void Scheduler::StopExpired(LaneSlot& slot, TimePoint now) {
  slot.deadline = kNever;
  for (Request* const request : slot.running) {
    if (request->deadline <= now) StopRunning(*request, Code::kDeadlineExceeded);
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

void Scheduler::LaneEnded(int lane) {
  lanes_[lane].running.clear();
  lanes_[lane].deadline = kNever;
}

void Scheduler::LaneDone(int lane) {
  LaneSlot& slot = lanes_[lane];
  assert(slot.busy);
  LaneEnded(lane);
  slot.busy = false;
  const LaneState state = lanes();
  // An empty queue alone is not enough: a tenant's running requests count when others arrive.
  if (state.free == state.total && queue_.empty()) queue_.ForgetShares();
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
