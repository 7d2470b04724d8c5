// SPDX-License-Identifier: Apache-2.0
//
// Runs one device: its lanes, its scheduler (queue and plan) and the thread that drives it. The
// thread waits only for work, a deadline or a free lane, so a deadline takes effect within a
// wake-up's latency even while every lane is busy.
//
// A small request that finds the queue empty and a lane free is started by the thread that submits
// it, unless another thread is planning: a wake-up would take longer. If the device was idle, that
// thread also polls briefly for the request's end, and answers it.
//
// Only one thread at a time plans and starts launches; driven_ is set while one does. Work that
// arrives in the meantime sets plan_stale_, which the driver checks before it stops. On a CPU,
// starting a small batch runs it, so callers plan concurrently with each other and with the
// scheduler's thread.
//
//            work, a deadline, a free lane (plan_stale_, or watch_ has passed)
//   asleep ------------------------------------------------------------> planning (Run)
//     ^                                                                      |
//     +---------------------- nothing to start until watch_ -----------------+
//
//   Push: queue empty, lane free, driven_ not set --> planning on the caller (RunOnCaller), which
//   wakes the thread if plan_stale_ was set in the meantime
//
// A thread that submits several requests at once marks them (Request::planner): Push leaves them
// queued, and PlanNow then plans all of them together.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/device/completion.h"
#include "server/metrics/metrics.h"
#include "server/request/request.h"
#include "server/schedule/scheduler.h"
#include "server/util/weight_share.h"

namespace attend {

struct DeviceWorkerOptions {
  int lanes = 4;
  LaneOptions lane;
  int64_t queue_requests_max = 1024;
  Duration aging = std::chrono::seconds(1);  // QueueOptions::aging
  BatcherOptions batcher;
};

class DeviceWorker {
 public:
  // `backend`, `metrics`, `clock` and `completion` must outlive the worker. `finish` ends requests
  // that never reached a lane (expired, cancelled, stopped); it is called without a lock.
  static Result<std::unique_ptr<DeviceWorker>> Make(
      int index, Backend& backend, const DeviceWorkerOptions& options,
      const TenantWeights& tenant_weights, Metrics& metrics, const Clock& clock,
      CompletionThreads& completion, std::function<void(std::unique_ptr<Request>)> finish);
  ~DeviceWorker();
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  // Scheduler::Judge. Thread-safe.
  Status Judge(Request& request);
  // Takes `request` if and only if OK. Thread-safe. With may_end_in_submit set, the request may
  // have ended when this returns. May throw std::bad_alloc; the request has not been taken then.
  Status Push(std::unique_ptr<Request>& request);
  // Engine::PlanNow. Thread-safe.
  void PlanNow();
  // Ends the request with CANCELLED if it is queued; stops its kernel if it is running.
  // Thread-safe.
  void Cancel(uint64_t id);
  // Ends queued requests with `status`, and refuses new ones with it. Stops running ones, which
  // then end with UNAVAILABLE. Thread-safe.
  void Abort(const Status& status);
  // Ends queued requests with `status`, then waits for running batches and joins the thread.
  void Stop(const Status& status);

  // Appends the running requests.
  void AddBusy(std::vector<BusyRequest>& busy) const;

  const DeviceInfo& info() const { return backend_.info(); }
  int lanes() const { return static_cast<int>(lanes_.size()); }
  bool healthy() const { return healthy_.load(std::memory_order_acquire); }
  int64_t queued() const;
  bool queue_full() const;
  // Time in which lanes ran batches, summed over lanes.
  Duration busy_time() const;

 private:
  // Batches started by the thread that submitted their requests.
  struct CallersRun {
    std::thread::id caller;
    bool polled = false;  // the thread polls its only batch; false if that failed to start
    int lane = -1;
    std::vector<CompletedBatch> ended;  // ended on that thread; it answers them
  };

  // Owned by the thread that starts a batch in it, then by the one that ends the batch.
  struct LaneSlot {
    std::unique_ptr<Lane> lane;
    std::vector<WorkItem> items;  // reused
    std::vector<std::unique_ptr<Request>> requests;
    std::shared_ptr<CallersRun> run;  // null: started by the scheduler's thread
  };

  DeviceWorker(int index, Backend& backend, const DeviceWorkerOptions& options,
               const TenantWeights& tenant_weights, Metrics& metrics, const Clock& clock,
               CompletionThreads& completion, std::function<void(std::unique_ptr<Request>)> finish);
  void Run();
  // Makes the scheduler's thread wake up for the deadlines of started batches. True if it must be
  // woken.
  bool WatchDeadlinesLocked() ATTEND_REQUIRES(mutex_);
  bool MayPlanOnCallerLocked() const ATTEND_REQUIRES(mutex_);
  Scheduler::Step PlanLocked(TimePoint now) ATTEND_REQUIRES(mutex_);
  // Whether there are queued requests besides those left for PlanNow.
  bool WaitingLocked() const ATTEND_REQUIRES(mutex_) {
    return scheduler_.queue().size() > unplanned_.load(std::memory_order_relaxed);
  }
  // Plans on the calling thread. RunOnCaller must follow, without the lock.
  std::shared_ptr<CallersRun> PlanOnCallerLocked(Scheduler::Step* step) ATTEND_REQUIRES(mutex_);
  void RunOnCaller(Scheduler::Step& step, const std::shared_ptr<CallersRun>& run)
      ATTEND_EXCLUDES(mutex_);
  // Whether the scheduler's thread must wake up before watch_.
  bool WokenLocked() const ATTEND_REQUIRES(mutex_);
  // `run` is null on the scheduler's thread.
  void Start(Scheduler::Launch& launch, const std::shared_ptr<CallersRun>& run);
  void LaneDone(int lane, BatchOutcome outcome);
  void ReportLocked() ATTEND_REQUIRES(mutex_);
  void ReportLanesLocked() ATTEND_REQUIRES(mutex_);
  // busy_time() up to `now`.
  Duration BusyTimeLocked(TimePoint now) const ATTEND_REQUIRES(mutex_) {
    return busy_time_ + busy_lanes_ * (now - busy_since_);
  }
  void ReportQueueLocked(int tenant) ATTEND_REQUIRES(mutex_);
  void End(std::vector<std::unique_ptr<Request>> requests);

  const int index_;
  Backend& backend_;
  const bool beside_;  // a CPU: callers plan concurrently with others
  Metrics& metrics_;
  const Clock& clock_;
  CompletionThreads& completion_;
  const std::function<void(std::unique_ptr<Request>)> finish_;

  mutable Mutex mutex_;
  CondVar wake_;  // the scheduler's thread
  CondVar idle_;  // Stop waits on it
  Scheduler scheduler_ ATTEND_GUARDED_BY(mutex_);
  std::vector<LaneSlot> lanes_;
  std::atomic<bool> healthy_ = true;  // written under the lock
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  // Something has changed since the last plan.
  bool plan_stale_ ATTEND_GUARDED_BY(mutex_) = false;
  // Requests that Push left queued for PlanNow. Written under the lock.
  std::atomic<int64_t> unplanned_ = 0;
  // A thread is planning or starting its launches.
  bool driven_ ATTEND_GUARDED_BY(mutex_) = false;
  // Threads between PlanOnCallerLocked and the end of RunOnCaller.
  int callers_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Lanes busy since busy_since_; busy_time_ has the time before.
  int64_t busy_lanes_ ATTEND_GUARDED_BY(mutex_) = 0;
  TimePoint busy_since_ ATTEND_GUARDED_BY(mutex_);
  Duration busy_time_ ATTEND_GUARDED_BY(mutex_) = Duration::zero();
  // The scheduler's thread sleeps at most until then.
  TimePoint watch_ ATTEND_GUARDED_BY(mutex_) = kNever;
  std::thread thread_;
};

}  // namespace attend
