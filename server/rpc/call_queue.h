// SPDX-License-Identifier: Apache-2.0
//
// Small calls that wait for a thread, shared fairly between tenants by the thread time they use:
// start-time fair queueing (schedule/fair_share.h). A call's cost is known only after it has run,
// so a tenant is charged when its call ends, and may be ahead by as many calls as run concurrently.
//
// They run on worker threads that have other work too, on at most half of them (at least one).
// After each call a thread yields to the other work. Calls of one tenant start in order of arrival.
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
  // Bounds on one tenant's waiting calls.
  static constexpr int64_t kCallsMax = 1024;
  static constexpr int64_t kBytesMax = int64_t{4} << 20;

  // `workers` and `clock` must outlive the queue, and the queue everything posted.
  CallQueue(WorkerThreads& workers, const TenantWeights& weights, const Clock& clock);
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Runs `work` once, on one of the threads. `bytes`: size of the message that waits with it. On
  // RESOURCE_EXHAUSTED (the tenant's bound is reached) or std::bad_alloc it is not run.
  Status Post(int tenant, int64_t bytes, std::function<void()> work);

 private:
  struct Job {
    std::function<void()> work;
    int64_t bytes = 0;
  };
  struct Tenant {
    std::list<Job> waiting;
    int64_t bytes = 0;    // of the waiting calls
    int64_t running = 0;  // number of calls
  };

  Status Place(int tenant, std::list<Job>& job, bool& start);
  // Runs calls until none waits, or yields the thread after one and posts itself again.
  void Run();
  // Takes the next call. False: none waits, and this thread has left.
  bool Take(std::list<Job>& job, int& tenant, int64_t& floor);
  // Charges the tenant. True: other calls are waiting.
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
