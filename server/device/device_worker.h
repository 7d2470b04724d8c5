// SPDX-License-Identifier: Apache-2.0
//
// Runs one device: its lanes, its scheduler (queue and plan) and the thread that drives it. The
// thread waits only for work, a deadline or a free lane, so a deadline fires within the time of a
// wake-up even while every lane is busy.
//
// A small request that finds the queue empty and a lane free is started by the thread that brought
// it, if no other thread is planning at that moment: waking one would take longer. If the device
// was idle, that thread also polls for the request's end for a while, and answers it.
//
// One thread at a time plans and starts what was planned: driven_ says that one does. What comes
// meanwhile sets plan_stale_, which the driver looks at before it stops. On a CPU, starting a small
// batch is running it, so there callers plan beside each other and the scheduler's thread.
//
//            work, a deadline, a free lane (plan_stale_, or watch_ has come)
//   asleep ------------------------------------------------------------> planning (Run)
//     ^                                                                      |
//     +---------------------- nothing to start until watch_ -----------------+
//
//   Push: queue empty, lane free, nobody drives --> planning on the caller (RunOnCaller), which
//   wakes the thread if plan_stale_ was set meanwhile
//
// A thread that brings several requests at once says so (Request::planner): Push leaves them
// queued, and PlanNow does for all of them as Push does for one.

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
  // that never reached a lane (expired, cancelled, stopped); it is called with no lock held.
  static Result<std::unique_ptr<DeviceWorker>> Make(
      int index, Backend& backend, const DeviceWorkerOptions& options,
      const TenantWeights& tenant_weights, Metrics& metrics, const Clock& clock,
      CompletionThreads& completion, std::function<void(std::unique_ptr<Request>)> finish);
  ~DeviceWorker();
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  // Scheduler::Judge. Thread-safe.
  Status Judge(Request& request);
  // Takes `request` if and only if OK. Thread-safe. If may_end_in_submit is set, the request may
  // have ended when this returns. May throw std::bad_alloc, and then has not taken it.
  Status Push(std::unique_ptr<Request>& request);
  // Engine::PlanNow. Thread-safe.
  void PlanNow();
  // Ends the request with CANCELLED if it is still queued; if it is running, tells its kernel to
  // stop. Thread-safe.
  void Cancel(uint64_t id);
  // Ends queued requests with `status` and refuses new ones with it from now on. Running ones are
  // told to stop, and then end with UNAVAILABLE. Thread-safe.
  void Abort(const Status& status);
  // Ends queued requests with `status`, waits for running batches and the thread.
  void Stop(const Status& status);

  // Appends the running requests.
  void AddBusy(std::vector<BusyRequest>& busy) const;

  const DeviceInfo& info() const { return backend_.info(); }
  int lanes() const { return static_cast<int>(lanes_.size()); }
  bool healthy() const { return healthy_.load(std::memory_order_acquire); }
  int64_t queued() const;
  bool queue_full() const;
  // For how long lanes have run batches, all of them together.
  Duration busy_time() const;

 private:
  // Batches that run on the thread that brought their requests.
  struct CallersRun {
    std::thread::id caller;
    bool polled = false;  // there is one, and it has not ended when it has been started
    int lane = -1;
    std::vector<CompletedBatch> ended;  // on that thread
  };

  // Used by the thread that starts a batch in it, and then by the one that ends it.
  struct LaneSlot {
    std::unique_ptr<Lane> lane;
    std::vector<WorkItem> items;  // reused
    std::vector<std::unique_ptr<Request>> requests;
    std::shared_ptr<CallersRun> run;  // null: of the scheduler's thread
  };

  DeviceWorker(int index, Backend& backend, const DeviceWorkerOptions& options,
               const TenantWeights& tenant_weights, Metrics& metrics, const Clock& clock,
               CompletionThreads& completion, std::function<void(std::unique_ptr<Request>)> finish);
  void Run();
  // Ensures that the scheduler's thread wakes by the deadlines of what was started.
  bool WatchDeadlinesLocked() ATTEND_REQUIRES(mutex_);
  bool MayPlanOnCallerLocked() const ATTEND_REQUIRES(mutex_);
  Scheduler::Step PlanLocked(TimePoint now) ATTEND_REQUIRES(mutex_);
  // Whether requests wait that no thread is about to plan.
  bool WaitingLocked() const ATTEND_REQUIRES(mutex_) {
    return scheduler_.queue().size() > unplanned_.load(std::memory_order_relaxed);
  }
  // Plans on the thread that brought a request: RunOnCaller must follow, without the lock.
  std::shared_ptr<CallersRun> PlanOnCallerLocked(Scheduler::Step* step) ATTEND_REQUIRES(mutex_);
  void RunOnCaller(Scheduler::Step& step, const std::shared_ptr<CallersRun>& run)
      ATTEND_EXCLUDES(mutex_);
  // Whether the scheduler's thread has something to do before the time it waits for.
  bool WokenLocked() const ATTEND_REQUIRES(mutex_);
  // `run` is null on the scheduler's thread.
  void Start(Scheduler::Launch& launch, const std::shared_ptr<CallersRun>& run);
  void LaneDone(int lane, BatchOutcome outcome);
  void ReportLocked() ATTEND_REQUIRES(mutex_);
  void ReportLanesLocked() ATTEND_REQUIRES(mutex_);
  // Of the lanes, until `now`.
  Duration BusyTimeLocked(TimePoint now) const ATTEND_REQUIRES(mutex_) {
    return busy_time_ + busy_lanes_ * (now - busy_since_);
  }
  void ReportQueueLocked(int tenant) ATTEND_REQUIRES(mutex_);
  void End(std::vector<std::unique_ptr<Request>> requests);

  const int index_;
  Backend& backend_;
  const bool beside_;  // callers plan beside others
  Metrics& metrics_;
  const Clock& clock_;
  CompletionThreads& completion_;
  const std::function<void(std::unique_ptr<Request>)> finish_;

  mutable Mutex mutex_;
  CondVar wake_;  // the scheduler thread
  CondVar idle_;  // Stop
  Scheduler scheduler_ ATTEND_GUARDED_BY(mutex_);
  std::vector<LaneSlot> lanes_;
  std::atomic<bool> healthy_ = true;  // written under the lock
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  // Something changed since the scheduler last planned.
  bool plan_stale_ ATTEND_GUARDED_BY(mutex_) = false;
  // Queued requests that Push has left for PlanNow. Written under the lock.
  std::atomic<int64_t> unplanned_ = 0;
  // A thread is planning or starting what was planned.
  bool driven_ ATTEND_GUARDED_BY(mutex_) = false;
  // Threads from PlanOnCallerLocked to the end of RunOnCaller.
  int callers_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Lanes that have been busy since then, and the time of all before.
  int64_t busy_lanes_ ATTEND_GUARDED_BY(mutex_) = 0;
  TimePoint busy_since_ ATTEND_GUARDED_BY(mutex_);
  Duration busy_time_ ATTEND_GUARDED_BY(mutex_) = Duration::zero();
  // The scheduler's thread sleeps at most until then.
  TimePoint watch_ ATTEND_GUARDED_BY(mutex_) = kNever;
  std::thread thread_;
};

}  // namespace attend
