// SPDX-License-Identifier: Apache-2.0
//
// The reference check of answers. It runs on threads of its own, so that neither lanes nor
// completion threads wait for double precision, and their priority is lower. A budget of
// multiply-adds bounds the cost of one check at any length. Places, which requests take before they
// are accepted, bound how many may wait. A check whose answer is no longer wanted ends at once and
// frees its memory, whether it waits or runs.

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
  double work_budget = 1 << 26;          // multiply-adds of one check: some 0.1 s of one core
  double sampled_work_budget = 1 << 18;  // of one that the server sampled
  int threads = 1;
  // While this many checks wait or run, the server samples no request. Several may be sampled
  // before the first of them has been computed, and then wait for each other.
  int64_t backlog_max = 256;
  // The most bytes of sessions' keys that one check copies, or its dump.
  int64_t copied_bytes_max = thresholds::kCheckedKeysBytesMax;
  int64_t places_max = 256;  // accepted requests that will be checked, at any stage
  uint64_t seed = 1;
};

class Checker {
 public:
  // `pool`, the server's memory budget, has what checks copy from devices.
  // `finish` receives each request: with its report set; or, if it was cancelled, its deadline
  // passed or there was no memory for the check, with that as its status. A request that only the
  // server wanted checked, and that could not be, has no report and stays OK. Called on a checker
  // thread, or within Post, Cancel or Abort.
  Checker(const CheckerOptions& options, const TenantWeights& tenant_weights, const Clock& clock,
          HostPool& pool, std::function<void(std::unique_ptr<Request>)> finish);
  ~Checker();  // Stop() first, if not done

  // Whether the server wants request `id` checked: a seeded draw, the same for the same id.
  bool Sampled(uint64_t id) const;
  // False if the backlog is full. For checks that may be skipped.
  bool HasRoom() const;
  // Takes a place for a request that will be posted or released. False if there is none.
  bool Reserve();
  // The request has ended, checked or not.
  void Release() { places_.fetch_sub(1, std::memory_order_relaxed); }
  // Takes a request that has a place.
  void Post(std::unique_ptr<Request> request);

  // Ends the request with CANCELLED (or DEADLINE_EXCEEDED) if it is here. Any thread.
  void Cancel(uint64_t id);
  // Ends every request that is here, or is posted later, with UNAVAILABLE.
  void Abort();
  // Adds the requests that are being checked.
  void AddBusy(std::vector<BusyRequest>& busy) const;
  // Checks every posted request, then joins. No Post may follow; all else may be called meanwhile.
  void Stop();

 private:
  // Checks the next request, if there is one.
  void CheckNext();
  // Ends waiting requests and stops running checks at their deadlines, until destruction.
  void WatchDeadlines();
  double WorkBudget(const Request& request) const;
  TimePoint EarliestDeadline() const ATTEND_REQUIRES(mutex_);
  void Check(Request& request);
  Result<FetchedKeys> FetchKeys(const Request& request, std::span<const RowId> rows) const;
  // Ends a request that waited. Releases the lock meanwhile.
  void End(std::unique_ptr<Request> request, Code code) ATTEND_REQUIRES(mutex_);
  // Sets the outcome of a request whose check could not be made.
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
  TimePoint watched_ ATTEND_GUARDED_BY(mutex_) = kNever;     // WatchDeadlines looks again then
  int64_t busy_ ATTEND_GUARDED_BY(mutex_) = 0;               // requests taken from the queue
  bool aborted_ ATTEND_GUARDED_BY(mutex_) = false;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::unique_ptr<WorkerThreads> workers_;  // one CheckNext for each request in the queue, or more
  std::thread watcher_;
};

}  // namespace attend
