// SPDX-License-Identifier: Apache-2.0

#include "server/device/device_worker.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <string>
#include <utility>

#include "kernels/contract/cost.h"
#include "kernels/util/thread_name.h"
#include "kernels/util/trace_range.h"
#include "server/memory/memory_reserve.h"
#include "server/util/assign.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

SchedulerOptions MakeSchedulerOptions(const DeviceWorkerOptions& options,
                                      const TenantWeights& tenant_weights, const DeviceInfo& info) {
  return {options.lanes,
          {options.queue_requests_max, tenant_weights, options.aging},
          options.batcher,
          CostPerSecond(info)};
}

WorkItem ToWorkItem(Request& request) {
  WorkItem item;
  item.attention = request.attention;
  item.selection = request.selection;
  item.inputs = request.input_spans;
  item.outputs = request.output_spans;
  item.poison_output = request.to_be_checked();
  item.stop = &request.stop;
  if (request.backward) item.gradients = request.backward->gradients;
  request.source.ApplyTo(item);
  return item;
}

BatchEnd EndOf(const BatchOutcome& outcome) {
  BatchEnd end = BatchEnd::kWhole;
  for (const Status& status : outcome.statuses) {
    if (status.code() == Code::kCancelled) {
      end = BatchEnd::kStopped;
    } else if (!status.ok()) {
      return BatchEnd::kFailed;
    }
  }
  return end;
}

}  // namespace

Result<std::unique_ptr<DeviceWorker>> DeviceWorker::Make(
    int index, Backend& backend, const DeviceWorkerOptions& options,
    const TenantWeights& tenant_weights, Metrics& metrics, const Clock& clock,
    CompletionThreads& completion, std::function<void(std::unique_ptr<Request>)> finish) {
  std::unique_ptr<DeviceWorker> worker(new DeviceWorker(
      index, backend, options, tenant_weights, metrics, clock, completion, std::move(finish)));
  for (LaneSlot& slot : worker->lanes_) {
    ATTEND_RETURN_IF_ERROR(Assign(slot.lane, backend.MakeLane(options.lane)));
  }
  worker->thread_ = std::thread([raw = worker.get()] { raw->Run(); });
  return worker;
}

DeviceWorker::DeviceWorker(int index, Backend& backend, const DeviceWorkerOptions& options,
                           const TenantWeights& tenant_weights, Metrics& metrics,
                           const Clock& clock, CompletionThreads& completion,
                           std::function<void(std::unique_ptr<Request>)> finish)
    : index_(index),
      backend_(backend),
      beside_(backend.info().kind == DeviceKind::kCpu),
      metrics_(metrics),
      clock_(clock),
      completion_(completion),
      finish_(std::move(finish)),
      scheduler_(MakeSchedulerOptions(options, tenant_weights, backend.info())),
      lanes_(std::max(1, options.lanes)) {}

DeviceWorker::~DeviceWorker() { Stop(Unavailable("the server is stopping")); }

Status DeviceWorker::Push(std::unique_ptr<Request>& request) {
  assert(request->source.gathered() == nullptr ||
         (backend_.Gathers() && !request->in_parts && !request->to_be_checked()));
  MutexLock lock(mutex_);
  request->device_name = info().name;
  const Request& pushed = *request;
  const bool first = scheduler_.queue().empty();
  ATTEND_RETURN_IF_ERROR(scheduler_.Push(request, clock_.Now()));
  assert(request == nullptr && "taken if and only if OK");
  const OnNoMemory wait(OnNoMemory::kWait);  // the request has been accepted: it must not fail now
  const bool plans = pushed.planner == std::this_thread::get_id();
  if (plans && !pushed.large && scheduler_.queue().size() < thresholds::kPlannedTogetherMost &&
      !scheduler_.queue().full()) {
    unplanned_.fetch_add(1, std::memory_order_relaxed);
    return Status();
  }
  if ((first || plans) && pushed.may_end_in_submit && !pushed.large && MayPlanOnCallerLocked()) {
    Scheduler::Step step;
    const std::shared_ptr<CallersRun> run = PlanOnCallerLocked(&step);
    lock.Unlock();
    RunOnCaller(step, run);
    return Status();
  }
  ReportQueueLocked(pushed.tenant);
  // One wake-up suffices until the next plan; a driving thread checks plan_stale_ before it stops.
  const bool notify = !std::exchange(plan_stale_, true) && !driven_;
  lock.Unlock();
  if (notify) wake_.NotifyOne();
  return Status();
}

Status DeviceWorker::Judge(Request& request) {
  const MutexLock lock(mutex_);
  return scheduler_.Judge(request, clock_.Now());
}

void DeviceWorker::PlanNow() {
  // Unlocked: a thread sees the requests that it pushed itself, unless they have been planned.
  if (unplanned_.load(std::memory_order_relaxed) == 0) return;
  MutexLock lock(mutex_);
  if (unplanned_.load(std::memory_order_relaxed) == 0) return;
  const OnNoMemory wait(OnNoMemory::kWait);
  if ((beside_ || !plan_stale_) && MayPlanOnCallerLocked()) {
    Scheduler::Step step;
    const std::shared_ptr<CallersRun> run = PlanOnCallerLocked(&step);
    lock.Unlock();
    return RunOnCaller(step, run);
  }
  unplanned_.store(0, std::memory_order_relaxed);
  scheduler_.WillPlan(clock_.Now());
  ReportLocked();
  const bool notify = !std::exchange(plan_stale_, true) && !driven_;
  lock.Unlock();
  if (notify) wake_.NotifyOne();
}

Scheduler::Step DeviceWorker::PlanLocked(TimePoint now) {
  unplanned_.store(0, std::memory_order_relaxed);
  return scheduler_.Plan(now);
}

bool DeviceWorker::MayPlanOnCallerLocked() const {
  return (beside_ || !driven_) && !stop_ && scheduler_.lanes().free > 0;
}

std::shared_ptr<DeviceWorker::CallersRun> DeviceWorker::PlanOnCallerLocked(Scheduler::Step* step) {
  assert((beside_ || !driven_) && "two threads would start batches at once");
  const LaneState lanes = scheduler_.lanes();
  auto run = std::make_shared<CallersRun>();
  run->caller = std::this_thread::get_id();
  if (!beside_) driven_ = true;
  ++callers_;
  *step = PlanLocked(clock_.Now());
  run->polled = lanes.free == lanes.total && step->launches.size() == 1;
  ReportLocked();
  return run;
}

void DeviceWorker::RunOnCaller(Scheduler::Step& step, const std::shared_ptr<CallersRun>& run) {
  End(std::move(step.ended));
  for (Scheduler::Launch& launch : step.launches) Start(launch, run);
  bool notify = false;
  {
    const MutexLock lock(mutex_);
    if (!beside_) driven_ = false;
    // For requests that arrived in between, or wait for a fuller batch or their deadline.
    plan_stale_ = WatchDeadlinesLocked() || plan_stale_ || WaitingLocked();
    notify = plan_stale_ && !driven_;
  }
  if (notify) wake_.NotifyOne();
  if (run->polled && run->lane >= 0) lanes_[run->lane].lane->Poll(thresholds::kPollAtMost);
  for (CompletedBatch& batch : run->ended) completion_.Handle(std::move(batch));
  const MutexLock lock(mutex_);
  --callers_;
  assert(callers_ >= 0);
  if (stop_) idle_.NotifyAll();  // under the lock: Stop may return and destroy this object
}

bool DeviceWorker::WatchDeadlinesLocked() {
  const TimePoint due = scheduler_.running_deadline();
  if (due >= watch_) return false;
  watch_ = due;
  return true;
}

void DeviceWorker::Cancel(uint64_t id) {
  std::unique_ptr<Request> request;
  {
    const MutexLock lock(mutex_);
    request = scheduler_.Cancel(id, clock_.Now());
    if (request != nullptr) ReportQueueLocked(request->tenant);
  }
  if (request != nullptr) finish_(std::move(request));
}

void DeviceWorker::Abort(const Status& status) {
  std::vector<std::unique_ptr<Request>> ended;
  {
    const MutexLock lock(mutex_);
    ended = scheduler_.Close(status);
    scheduler_.StopAll(Code::kUnavailable);
    ReportLocked();
  }
  End(std::move(ended));
}

void DeviceWorker::Stop(const Status& status) {
  std::vector<std::unique_ptr<Request>> ended;
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    ended = scheduler_.Close(status);
    ReportLocked();
  }
  wake_.NotifyOne();
  End(std::move(ended));
  // The thread first: it may be about to start a batch that it took before stop_ was set.
  if (thread_.joinable()) thread_.join();
  const MutexLock lock(mutex_);
  while (scheduler_.lanes().free < lanes() || callers_ > 0) idle_.Wait(mutex_);
}

void DeviceWorker::AddBusy(std::vector<BusyRequest>& busy) const {
  const MutexLock lock(mutex_);
  for (const Request* const request : scheduler_.running()) {
    busy.push_back(
        Busy(*request, std::string(KernelName(request->selection.kernel)) + " on " + info().name));
  }
}

int64_t DeviceWorker::queued() const {
  const MutexLock lock(mutex_);
  return scheduler_.queue().size();
}

bool DeviceWorker::queue_full() const {
  const MutexLock lock(mutex_);
  return scheduler_.queue().full();
}

Duration DeviceWorker::busy_time() const {
  const MutexLock lock(mutex_);
  return BusyTimeLocked(clock_.Now());
}

void DeviceWorker::ReportLanesLocked() {
  const LaneState lanes = scheduler_.lanes();
  const TimePoint now = clock_.Now();
  busy_time_ = BusyTimeLocked(now);
  busy_since_ = now;
  busy_lanes_ = lanes.total - lanes.free;
  metrics_.SetLanesBusy(index_, busy_lanes_);
}

void DeviceWorker::ReportLocked() {
  const RequestQueue& queue = scheduler_.queue();
  ReportLanesLocked();
  metrics_.SetQueue(index_, queue.size());
  metrics_.SetBacklog(index_, scheduler_.Backlog(clock_.Now()));
  for (int tenant = 0; tenant < queue.tenants(); ++tenant) {
    metrics_.SetTenantQueue(index_, tenant, queue.tenant_size(tenant));
  }
}

void DeviceWorker::ReportQueueLocked(int tenant) {
  metrics_.SetQueue(index_, scheduler_.queue().size());
  metrics_.SetBacklog(index_, scheduler_.Backlog(clock_.Now()));
  metrics_.SetTenantQueue(index_, tenant, scheduler_.queue().tenant_size(tenant));
}

void DeviceWorker::End(std::vector<std::unique_ptr<Request>> requests) {
  for (auto& request : requests) finish_(std::move(request));
}

bool DeviceWorker::WokenLocked() const { return stop_ || (plan_stale_ && !driven_); }

void DeviceWorker::Run() {
  NameThread("attend-schedule");
  MutexLock lock(mutex_);
  // Requests that a caller will plan may have arrived before this thread has started.
  while (!WokenLocked()) wake_.Wait(mutex_);
  while (!stop_) {
    if (driven_) {  // the caller checks plan_stale_ when it is done
      plan_stale_ = true;
      while (!WokenLocked()) wake_.Wait(mutex_);
      continue;
    }
    plan_stale_ = false;
    const TimePoint now = clock_.Now();
    Scheduler::Step step = PlanLocked(now);
    if (!step.empty()) {
      ReportLocked();
      driven_ = true;
      lock.Unlock();
      End(std::move(step.ended));
      for (Scheduler::Launch& launch : step.launches) Start(launch, nullptr);
      lock.Lock();
      driven_ = false;
      continue;
    }
    // Batches started by callers share one wake-up at their earliest deadline, although they may
    // have ended by then: cheaper than one wake-up each.
    if (watch_ <= now) watch_ = kNever;
    watch_ = std::min(watch_, step.wake);
    while (!WokenLocked() && clock_.WaitUntil(wake_, mutex_, watch_)) {
    }
  }
}

void DeviceWorker::Start(Scheduler::Launch& launch, const std::shared_ptr<CallersRun>& run) {
  const TraceRange range("attend: start a batch");
  const TimePoint now = clock_.Now();
  const int64_t requests = static_cast<int64_t>(launch.requests.size());
  LaneSlot& slot = lanes_[launch.lane];
  slot.items.clear();
  int64_t elements = 0;
  for (const auto& request : launch.requests) elements += request->elements;
  for (const auto& request : launch.requests) {
    request->started = now;
    request->batch_requests = requests;
    request->batch_elements = elements;
    slot.items.push_back(ToWorkItem(*request));
  }
  metrics_.RecordBatch(index_, requests, launch.flops, launch.closed);
  slot.requests = std::move(launch.requests);
  slot.run = run;
  Done done = [this, lane = launch.lane](BatchOutcome outcome) {
    LaneDone(lane, std::move(outcome));
  };
  if (run != nullptr) run->lane = launch.lane;
  const Status status = run != nullptr && run->polled
                            ? slot.lane->SubmitPolled(slot.items, std::move(done))
                            : slot.lane->Submit(slot.items, std::move(done));
  if (status.ok()) return;
  if (run != nullptr) run->polled = false;
  BatchOutcome outcome;
  outcome.statuses.assign(static_cast<size_t>(requests), status);
  outcome.device_lost = status.code() == Code::kUnavailable;
  LaneDone(launch.lane, std::move(outcome));
}

void DeviceWorker::LaneDone(int lane, BatchOutcome outcome) {
  std::vector<std::unique_ptr<Request>> batch = std::move(lanes_[lane].requests);
  const std::shared_ptr<CallersRun> run = std::move(lanes_[lane].run);
  assert(outcome.statuses.size() == batch.size() && "a status for each request");
  const TimePoint now = clock_.Now();
  for (const auto& request : batch) request->completed = now;
  metrics_.RecordOutcome(index_, outcome);  // here: completion splits the batch
  {
    const MutexLock lock(mutex_);
    scheduler_.LaneEnded(lane, EndOf(outcome), now);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    // A stopped request gets its stop's status, unless it ended before the kernel saw the stop.
    if (outcome.statuses[i].code() != Code::kCancelled || !batch[i]->stop.set()) continue;
    outcome.statuses[i] = StoppedStatus(batch[i]->stop_code);
  }
  std::vector<std::unique_ptr<Request>> orphaned;
  if (outcome.device_lost) {
    // Whatever error CUDA gave each request, it may succeed elsewhere or later.
    for (Status& status : outcome.statuses) {
      if (status.ok()) continue;
      status = Unavailable("device " + info().name + " is lost: " + std::string(status.message()));
    }
  }
  // Before any client is answered, so that a client that knows of the loss finds the device lost.
  if (outcome.device_lost) {
    const MutexLock lock(mutex_);
    if (healthy()) {
      metrics_.SetDeviceHealthy(index_, false);  // first: healthy() is read without the lock
      healthy_.store(false, std::memory_order_release);
      orphaned = scheduler_.Close(Unavailable("device " + info().name + " is lost"));
      ReportLocked();
    }
  }
  CompletedBatch completed{index_, std::move(batch), std::move(outcome)};
  if (run != nullptr && run->caller == std::this_thread::get_id()) {
    run->ended.push_back(std::move(completed));
  } else {
    // Before the lane is free: Stop() returns once all are, and nothing may be posted after it.
    completion_.Post(std::move(completed));
  }
  End(std::move(orphaned));
  const MutexLock lock(mutex_);
  scheduler_.LaneDone(lane);
  ReportLanesLocked();
  // Under the lock: once Stop() sees the lane free, this object may be destroyed.
  if (WaitingLocked() || stop_) {
    plan_stale_ = true;
    if (!driven_) wake_.NotifyOne();
  }
  if (stop_) idle_.NotifyAll();
}

}  // namespace attend
