// SPDX-License-Identifier: Apache-2.0

#include "server/device_worker.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <utility>

namespace attend {
namespace {

constexpr char kExpired[] = "the deadline passed while the request was queued";

}  // namespace

// What one pass of the scheduler decided, to be carried out without the lock.
struct DeviceWorker::Step {
  std::vector<std::unique_ptr<Request>> expired;
  struct Launch {
    LaneSlot* slot;
    std::vector<std::unique_ptr<Request>> batch;
  };
  std::vector<Launch> launches;
  TimePoint wake = kNever;

  bool empty() const { return expired.empty() && launches.empty(); }
};

Result<std::unique_ptr<DeviceWorker>> DeviceWorker::Make(
    int index, Backend& backend, const DeviceWorkerOptions& options, Metrics& metrics,
    const Clock& clock, CompletionThread& completion,
    std::function<void(std::unique_ptr<Request>)> finish) {
  std::unique_ptr<DeviceWorker> worker(
      new DeviceWorker(index, backend, options, metrics, clock, completion, std::move(finish)));
  for (LaneSlot& slot : worker->lanes_) {
    Result<std::unique_ptr<Lane>> lane = backend.MakeLane(options.lane);
    if (!lane.ok()) return lane.status();
    slot.lane = std::move(*lane);
  }
  worker->thread_ = std::thread([raw = worker.get()] { raw->Run(); });
  return worker;
}

DeviceWorker::DeviceWorker(int index, Backend& backend, const DeviceWorkerOptions& options,
                           Metrics& metrics, const Clock& clock, CompletionThread& completion,
                           std::function<void(std::unique_ptr<Request>)> finish)
    : index_(index),
      backend_(backend),
      metrics_(metrics),
      clock_(clock),
      completion_(completion),
      finish_(std::move(finish)),
      batcher_(options.batcher),
      queue_(options.queue_requests_max),
      lanes_(std::max(1, options.lanes)) {}

DeviceWorker::~DeviceWorker() { Stop(Unavailable("the server is stopping")); }

Status DeviceWorker::Push(std::unique_ptr<Request>& request) {
  bool notify = false;
  {
    std::lock_guard lock(mutex_);
    if (stop_) return Unavailable("the server is stopping");
    if (!healthy_) return Unavailable("device " + info().name + " is lost");
    request->enqueued = clock_.Now();
    request->device_name = info().name;
    ATTEND_RETURN_IF_ERROR(queue_.Push(request));
    metrics_.SetQueue(index_, queue_.size());
    // One wake-up is enough until the scheduler has looked.
    notify = !std::exchange(poked_, true);
  }
  if (notify) wake_.notify_one();
  return Status();
}

void DeviceWorker::Cancel(uint64_t id) {
  std::unique_ptr<Request> request;
  {
    std::lock_guard lock(mutex_);
    request = queue_.TakeById(id);
    if (request != nullptr) metrics_.SetQueue(index_, queue_.size());
  }
  if (request == nullptr) return;
  // gRPC ends a call at its deadline as if the client had cancelled it.
  request->status = request->deadline <= clock_.Now()
                        ? Status(Code::kDeadlineExceeded, kExpired)
                        : Status(Code::kCancelled, "cancelled by the client while queued");
  finish_(std::move(request));
}

void DeviceWorker::Stop(const Status& status) {
  std::vector<std::unique_ptr<Request>> ended;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    FailQueuedLocked(status, ended);
  }
  wake_.notify_one();
  End(std::move(ended), status);
  // The thread first: it may be about to start a batch that it took before the stop.
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  lane_free_.wait(lock, [this] { return LaneStateLocked().free == lanes(); });
}

bool DeviceWorker::healthy() const {
  std::lock_guard lock(mutex_);
  return healthy_;
}

int64_t DeviceWorker::queued() const {
  std::lock_guard lock(mutex_);
  return queue_.size();
}

double DeviceWorker::outstanding_flops() const {
  std::lock_guard lock(mutex_);
  return queue_.flops() + running_flops_;
}

LaneState DeviceWorker::LaneStateLocked() const {
  LaneState state{static_cast<int>(lanes_.size()), 0, 0};
  for (const LaneSlot& slot : lanes_) {
    if (!slot.busy) ++state.free;
    if (slot.busy && slot.large) ++state.large;
  }
  return state;
}

void DeviceWorker::FailQueuedLocked(const Status& status,
                                    std::vector<std::unique_ptr<Request>>& ended) {
  ended = queue_.TakeAll();
  for (const auto& request : ended) request->status = status;
  metrics_.SetQueue(index_, 0);
}

void DeviceWorker::End(std::vector<std::unique_ptr<Request>> requests, const Status& status) {
  for (auto& request : requests) {
    request->status = status;
    finish_(std::move(request));
  }
}

void DeviceWorker::PlanLocked(TimePoint now, Step& step) {
  step.expired = queue_.TakeExpired(now);
  for (;;) {
    const LaneState lanes = LaneStateLocked();
    const BatchDecision decision = batcher_.Next(queue_, lanes, now);
    step.wake = decision.wake;
    if (decision.take.empty()) break;
    const auto slot =
        std::find_if(lanes_.begin(), lanes_.end(), [](const LaneSlot& each) { return !each.busy; });
    assert(slot != lanes_.end());
    Step::Launch launch{&*slot, {}};
    launch.batch.reserve(decision.take.size());
    slot->flops = 0;
    for (const QueueKey& key : decision.take) {
      launch.batch.push_back(queue_.Take(key));
      slot->flops += launch.batch.back()->flops;
    }
    slot->busy = true;
    slot->large = decision.large;
    running_flops_ += slot->flops;
    step.launches.push_back(std::move(launch));
  }
  if (step.empty()) return;
  const LaneState lanes = LaneStateLocked();
  metrics_.SetQueue(index_, queue_.size());
  metrics_.SetLanesBusy(index_, lanes.total - lanes.free);
}

void DeviceWorker::Execute(Step& step) {
  End(std::move(step.expired), Status(Code::kDeadlineExceeded, kExpired));
  for (Step::Launch& launch : step.launches) Start(*launch.slot, std::move(launch.batch));
}

void DeviceWorker::Run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    poked_ = false;
    Step step;
    PlanLocked(clock_.Now(), step);
    if (!step.empty()) {
      lock.unlock();
      Execute(step);
      lock.lock();
      continue;
    }
    const auto changed = [this] { return stop_ || poked_; };
    if (step.wake == kNever) {
      wake_.wait(lock, changed);
    } else {
      wake_.wait_until(lock, step.wake, changed);
    }
  }
}

void DeviceWorker::Start(LaneSlot& slot, std::vector<std::unique_ptr<Request>> batch) {
  const TimePoint now = clock_.Now();
  double flops = 0;
  slot.items.clear();
  for (const auto& request : batch) {
    request->started = now;
    request->batch_requests = static_cast<int64_t>(batch.size());
    flops += request->flops;
    slot.items.push_back({request->attention, request->selection,
                          HostSpan{request->input.data(), request->input.bytes()},
                          HostSpan{request->output.data(), request->output.bytes()},
                          request->check});
  }
  metrics_.RecordBatch(index_, static_cast<int64_t>(batch.size()), flops);
  // std::function wants a copyable callable; the batch is owned once all the same.
  auto owned = std::make_shared<std::vector<std::unique_ptr<Request>>>(std::move(batch));
  const Status status = slot.lane->Submit(slot.items, [this, &slot, owned](BatchOutcome outcome) {
    LaneDone(slot, std::move(*owned), std::move(outcome));
  });
  if (status.ok()) return;
  BatchOutcome outcome;
  outcome.statuses.assign(owned->size(), status);
  outcome.device_lost = status.code() == Code::kUnavailable;
  LaneDone(slot, std::move(*owned), std::move(outcome));
}

void DeviceWorker::LaneDone(LaneSlot& slot, std::vector<std::unique_ptr<Request>> batch,
                            BatchOutcome outcome) {
  const TimePoint now = clock_.Now();
  for (const auto& request : batch) request->completed = now;
  std::vector<std::unique_ptr<Request>> orphaned;
  const bool lost = outcome.device_lost;
  const Status lost_status = Unavailable("device " + info().name + " is lost");
  // Before anyone hears of it: who was told that the device is lost finds it lost.
  if (lost) {
    std::lock_guard lock(mutex_);
    if (std::exchange(healthy_, false)) {
      metrics_.SetDeviceHealthy(index_, false);
      FailQueuedLocked(lost_status, orphaned);
    }
  }
  // Before the lane is free: Stop() returns once all are, and then nothing may be posted.
  completion_.Post(CompletedBatch{index_, std::move(batch), std::move(outcome)});
  End(std::move(orphaned), lost_status);
  std::lock_guard lock(mutex_);
  slot.busy = false;
  running_flops_ -= slot.flops;
  const LaneState lanes = LaneStateLocked();
  if (lanes.free == lanes.total) running_flops_ = 0;  // sums of doubles drift
  metrics_.SetLanesBusy(index_, lanes.total - lanes.free);
  // Under the lock: once Stop() has seen the lane free, this object may go.
  if (!queue_.empty() || stop_) {
    poked_ = true;
    wake_.notify_one();
  }
  if (stop_) lane_free_.notify_all();
}

}  // namespace attend
