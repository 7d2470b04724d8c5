// SPDX-License-Identifier: Apache-2.0
//
// A thread that calls a function periodically, for example to check a file for changes.

#pragma once

#include <functional>
#include <thread>
#include <utility>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/thread_name.h"

namespace attend {

class PollThread {
 public:
  // Calls `look` every `period`, first after one period. `clock` must outlive the object.
  PollThread(ThreadName name, Duration period, const Clock& clock, std::function<void()> look)
      : period_(period),
        clock_(clock),
        look_(std::move(look)),
        thread_([this, name] { Run(name); }) {}
  // Waits for a call in progress.
  ~PollThread() {
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }
  PollThread(const PollThread&) = delete;
  PollThread& operator=(const PollThread&) = delete;

 private:
  void Run(ThreadName name) {
    NameThread(name);
    MutexLock lock(mutex_);
    for (;;) {
      const TimePoint until = clock_.Now() + period_;
      while (!stop_ && clock_.WaitUntil(wake_, mutex_, until)) {
      }
      if (stop_) return;
      lock.Unlock();
      look_();
      lock.Lock();
    }
  }

  const Duration period_;
  const Clock& clock_;
  const std::function<void()> look_;
  Mutex mutex_;
  CondVar wake_;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend
