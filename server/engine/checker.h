// SPDX-License-Identifier: Apache-2.0
//
// Runs reference checks of answers. They have their own threads, of lower priority, so that neither
// lanes nor completion threads wait for double precision. A budget of multiply-adds bounds the cost
// of one check at any length; places, taken before a request is accepted, bound how many may wait.
// A check whose answer is no longer wanted, waiting or running, ends at once and frees its memory.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/engine/fetched_keys.h"
#include "server/memory/host_pool.h"
#include "server/request/request.h"
#include "server/schedule/check_queue.h"
#include "server/util/thresholds.h"
#include "server/util/weight_share.h"
#include "server/util/worker_threads.h"

namespace attend {

struct CheckerOptions {
  double sample = 0;                     // fraction of requests that the server samples, 0 to 1
  double work_budget = 1 << 26;          // multiply-adds per check: about 0.1 s of a core
  double sampled_work_budget = 1 << 18;  // per check that the server sampled
  int threads = 1;
  // The server samples no request while this many checks wait or run. Several may be sampled before
  // the first has been computed, so they may still wait for each other.
  int64_t backlog_max = 256;
  // Maximum bytes of session keys that one check, or its dump, copies.
  int64_t copied_bytes_max = thresholds::kCheckedKeysBytesMax;
  int64_t places_max = 256;  // accepted requests that will be checked, at any stage
  uint64_t seed = 1;
};

class Checker {
 public:
  // Copies of device memory come from `pool`, the server's memory budget. `finish` receives each
  // request: with its report, or with an error status if it was cancelled, its deadline passed or
  // memory was short. A request sampled by the server that cannot be checked stays OK and has no
  // report. Called on a checker thread, or within Post, Cancel or Abort.
  Checker(const CheckerOptions& options, const TenantWeights& tenant_weights, const Clock& clock,
          HostPool& pool, std::function<void(std::unique_ptr<Request>)> finish);
  ~Checker();  // calls Stop() if needed

  // Whether the server samples request `id`: a seeded draw, the same for the same id.
  bool Sampled(uint64_t id) const;
  // False if the backlog is full. For checks that may be skipped.
  bool HasRoom() const;
  // Takes a place for a request; Release returns it. False if there is none.
  bool Reserve();
  // Returns the place of a request that has ended, checked or not.
  void Release() { places_.fetch_sub(1, std::memory_order_relaxed); }
  // Takes a request that has a place.
  void Post(std::unique_ptr<Request> request);

  // Ends the request with CANCELLED (or DEADLINE_EXCEEDED) if it is here. Any thread.
  void Cancel(uint64_t id);
  // Ends every request that is here or is posted later with UNAVAILABLE.
  void Abort();
  // Appends the requests whose check is running.
  void AddBusy(std::vector<BusyRequest>& busy) const;
  // Completes every posted check, then joins the threads. No Post may follow; the other functions
  // may be called during Stop.
  void Stop();

 private:
  // Runs the next waiting check, if any.
  void CheckNext();
  // Enforces deadlines of waiting and running checks; the watcher thread's loop.
  void WatchDeadlines();
  double WorkBudget(const Request& request) const;
  TimePoint EarliestDeadline() const ATTEND_REQUIRES(mutex_);
  void Check(Request& request);
  Result<FetchedKeys> FetchKeys(const Request& request, std::span<const RowId> rows) const;
  // Ends a request that was waiting. Releases the lock while it does.
  void End(std::unique_ptr<Request> request, Code code) ATTEND_REQUIRES(mutex_);
  // Sets the outcome of a request that could not be checked.
  static void Fail(Request& request, Status why);

  const CheckerOptions options_;
  const Clock& clock_;
  HostPool& pool_;
  const std::function<void(std::unique_ptr<Request>)> finish_;
  std::atomic<int64_t> places_{0};
  mutable Mutex mutex_;
  CondVar due_;  // WatchDeadlines
  CheckQueue queue_ ATTEND_GUARDED_BY(mutex_);
  std::vector<Request*> running_ ATTEND_GUARDED_BY(mutex_);  // being checked
  TimePoint watched_ ATTEND_GUARDED_BY(mutex_) = kNever;     // WatchDeadlines wakes up then
  int64_t busy_ ATTEND_GUARDED_BY(mutex_) = 0;  // taken from the queue, not yet finished
  bool aborted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::unique_ptr<WorkerThreads> workers_;  // one posted CheckNext per queued request, or more
  std::thread watcher_;
};

}  // namespace attend
