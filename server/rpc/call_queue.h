// SPDX-License-Identifier: Apache-2.0
//
// Small calls that wait for a thread, in an order that is fair between tenants and priced by what
// each takes: start-time fair queueing (schedule/fair_share.h) of the time for which a call has
// held a thread. A call has no price before it has run, so a tenant is charged when its call ends,
// and may be ahead of others by as many calls as run at once.
//
// They run on threads that have other work too, and hold one of those, or as many as half of
// them. A thread takes its turn at the other work after each call. Calls of one tenant begin in the
// order in which they came.
//
// Thread-safe. No lock is held while a call runs.

#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/schedule/fair_share.h"
#include "server/util/weight_share.h"
#include "server/util/worker_threads.h"

namespace attend {

class CallQueue {
 public:
  // The most of one tenant that may wait.
  static constexpr int64_t kCallsMax = 1024;
  static constexpr int64_t kBytesMax = int64_t{4} << 20;

  // `workers` and `clock` must outlive the queue, which must outlive what was posted.
  CallQueue(WorkerThreads& workers, const TenantWeights& weights, const Clock& clock);
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Calls `work` once, on one of the threads. `bytes`: of the message that waits with it.
  // RESOURCE_EXHAUSTED, and it is not called: as much of the tenant's waits as may. May throw
  // std::bad_alloc, and then it is not called either.
  Status Post(int tenant, int64_t bytes, std::function<void()> work);

 private:
  struct Job {
    std::function<void()> work;
    int64_t bytes = 0;
  };
  struct Tenant {
    std::list<Job> waiting;
    int64_t bytes = 0;    // of those
    int64_t running = 0;  // calls
  };

  Status Place(int tenant, std::list<Job>& job, bool& start);
  // Runs calls until none waits, or another job of the threads is to take its turn.
  void Run();
  // Takes the call that is next. False: none waits, and this thread runs none any more.
  bool Take(std::list<Job>& job, int& tenant, int64_t& floor);
  // Charges for it. True: others wait.
  bool End(int tenant, Duration took, int64_t floor);
  void LeaveLocked() ATTEND_REQUIRES(mutex_);

  WorkerThreads& workers_;
  const Clock& clock_;
  const int64_t running_max_;
  Mutex mutex_;
  FairShare share_ ATTEND_GUARDED_BY(mutex_);
  std::vector<Tenant> tenants_ ATTEND_GUARDED_BY(mutex_);
  int64_t waiting_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t running_ ATTEND_GUARDED_BY(mutex_) = 0;  // threads that run calls, or are about to
};

}  // namespace attend
