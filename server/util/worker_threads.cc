// SPDX-License-Identifier: Apache-2.0
//
// A thread takes the first job of the list, claims its next part, and puts the job back at the end
// if parts are left: round robin, part by part. A job's list node moves with it, so running it
// allocates nothing.

#include "server/util/worker_threads.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace attend {

struct WorkerThreads::Job {
  Job(size_t parts, std::function<void(size_t)> part, std::function<void()> done)
      : parts(parts), part(std::move(part)), done(std::move(done)), left(parts) {}

  const size_t parts;
  const std::function<void(size_t)> part;
  const std::function<void()> done;
  size_t begun = 0;  // guarded by the threads' mutex
  std::atomic<size_t> left;
};

WorkerThreads::WorkerThreads(ThreadName name, int threads, int nicer) {
  for (int i = 0; i < std::max(1, threads); ++i) {
    threads_.emplace_back([this, name, nicer] {
      NameThread(name);
      if (nicer != 0) (void)!nice(nicer);  // per thread on Linux
      Run();
    });
  }
}

WorkerThreads::~WorkerThreads() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  posted_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::Post(size_t parts, std::function<void(size_t)> part,
                         std::function<void()> done) {
  // Allocated here, so that nothing is allocated under the lock or after the job is queued.
  std::list<std::shared_ptr<Job>> place = {
      std::make_shared<Job>(parts, std::move(part), std::move(done))};
  {
    const MutexLock lock(mutex_);
    jobs_.splice(jobs_.end(), place);
  }
  if (parts <= 1) {
    posted_.NotifyOne();
  } else {
    posted_.NotifyAll();
  }
}

void WorkerThreads::Run() {
  for (;;) {
    std::list<std::shared_ptr<Job>> place;
    std::shared_ptr<Job> job;
    size_t part = 0;
    {
      const MutexLock lock(mutex_);
      while (!stop_ && jobs_.empty()) posted_.Wait(mutex_);
      if (jobs_.empty()) return;
      place.splice(place.end(), jobs_, jobs_.begin());
      job = place.front();
      part = job->begun++;
      if (job->begun < job->parts) jobs_.splice(jobs_.end(), place);
    }
    if (job->parts > 0) {
      job->part(part);
      // Acquire and release: the thread of the last part sees the others' writes.
      if (job->left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
    }
    if (job->done) job->done();
  }
}

}  // namespace attend
