// SPDX-License-Identifier: Apache-2.0
//
// Threads that run posted jobs. A job may have several parts, which threads run in parallel. Jobs
// take turns part by part, so a short one waits at most for one part of each other job.

#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/thread_name.h"

namespace attend {

class WorkerThreads {
 public:
  // At least one thread, all with that name. `nicer` is added to their niceness.
  WorkerThreads(ThreadName name, int threads, int nicer = 0);
  ~WorkerThreads();  // runs what was posted, then joins
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }

  // Calls `part(0)` to `part(parts - 1)`, then `done` once, on the thread whose part ended last; it
  // sees the writes of all parts. Thread-safe; never waits.
  void Post(size_t parts, std::function<void(size_t)> part, std::function<void()> done);
  // Calls `job` once.
  void Post(std::function<void()> job) { Post(0, {}, std::move(job)); }

 private:
  struct Job;

  void Run();

  Mutex mutex_;
  CondVar posted_;
  std::list<std::shared_ptr<Job>> jobs_ ATTEND_GUARDED_BY(mutex_);  // with parts not yet begun
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attend
