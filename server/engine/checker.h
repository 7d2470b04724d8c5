// SPDX-License-Identifier: Apache-2.0
//
// The reference check of answers, on threads of its own so that neither lanes nor the completion
// threads wait for double precision, and of lower priority than theirs. The cost of one check is
// bounded by a budget of multiply-adds at any length, and how many may wait by places, which
// requests take before they are accepted. One that nobody waits for any more ends at once, with its
// memory, whether it waits or is being checked.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/request/request.h"
#include "server/schedule/check_queue.h"
#include "server/util/clock.h"
#include "server/util/worker_threads.h"

namespace attend {

struct CheckerOptions {
  double sample = 0;             // share of requests that the server checks by itself, 0 to 1
  double work_budget = 1 << 26;  // multiply-adds of one check: some 0.1 s of one core
  double sampled_work_budget = 1 << 18;  // of one that the server asked for
  int threads = 1;
  // While so many checks wait or run, no request becomes one of the server's own samples. Several
  // may be taken before the first of them has been computed, and then wait for each other.
  int64_t backlog_max = 256;
  int64_t places_max = 256;  // requests accepted and to be checked, wherever they are
  std::vector<int32_t> tenant_weights = {1};  // the engine sets them
  uint64_t seed = 1;
};

class Checker {
 public:
  // `finish` receives each request: with its report set; or, if it was cancelled, its deadline
  // passed or there was no memory for the check, with that as its status. What the server alone
  // wanted checked and could not check has no report and stays good. Called on a checker thread, or
  // within Post, Cancel or Abort.
  Checker(const CheckerOptions& options, const Clock& clock,
          std::function<void(std::unique_ptr<Request>)> finish);
  ~Checker();  // checks what was posted, then joins

  // Whether the server wants request `id` checked: a seeded draw, the same for the same id.
  bool Sampled(uint64_t id) const;
  // False if the backlog is full, for checks that may be left out.
  bool HasRoom() const;
  // Takes a place for a request that will be posted or released. False if there is none.
  bool Reserve();
  // The request has ended, checked or not.
  void Release() { places_.fetch_sub(1, std::memory_order_relaxed); }
  // Takes a request that has a place.
  void Post(std::unique_ptr<Request> request);

  // Ends the request with CANCELLED (or DEADLINE_EXCEEDED) if it is here. Any thread.
  void Cancel(uint64_t id);
  // Ends all that is here, and all that comes, with UNAVAILABLE.
  void Abort();
  // Adds what is being checked.
  void AddBusy(std::vector<BusyRequest>& busy) const;

 private:
  // Checks the request whose turn it is, if there is one.
  void CheckNext();
  // Ends what waits past its deadline and stops what is checked past it, until the checker goes.
  void WatchDeadlines();
  TimePoint EarliestDeadline() const ATTEND_REQUIRES(mutex_);
  void Check(Request& request);
  // Ends a request that waited. Lets go of the lock meanwhile.
  void End(std::unique_ptr<Request> request, Code code) ATTEND_REQUIRES(mutex_);
  // Sets what becomes of a request whose check could not be made.
  static void Fail(Request& request, Status why);

  const CheckerOptions options_;
  const Clock& clock_;
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
