// SPDX-License-Identifier: Apache-2.0
//
// Runs small functions at given times on one thread. They must not block.

#pragma once

#include <cassert>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "kernels/util/mutex.h"
#include "kernels/util/thread_name.h"

namespace attend::client {

class TimerThread {
 public:
  using Clock = std::chrono::steady_clock;  // real time is measured

  TimerThread() : thread_([this] { Run(); }) {}
  ~TimerThread() { Stop(); }

  // Drops functions that are not due, and later ones. Idempotent; must not be called from a
  // function that it runs.
  void Stop() {
    assert(std::this_thread::get_id() != thread_.get_id() && "it would wait for itself");
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    changed_.NotifyOne();
    if (thread_.joinable()) thread_.join();
  }

  void At(Clock::time_point when, std::function<void()> function) {
    const MutexLock lock(mutex_);
    const bool first = due_.empty() || when < due_.begin()->first;
    due_.emplace(when, std::move(function));
    if (first) changed_.NotifyOne();
  }

 private:
  void Run() {
    NameThread("attend-timer");
    MutexLock lock(mutex_);
    while (!stop_) {
      if (due_.empty()) {
        changed_.Wait(mutex_);
        continue;
      }
      const Clock::time_point next = due_.begin()->first;
      if (Clock::now() < next) {
        changed_.WaitUntil(mutex_, next);
        continue;
      }
      const std::function<void()> function = std::move(due_.begin()->second);
      due_.erase(due_.begin());
      lock.Unlock();
      function();
      lock.Lock();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::multimap<Clock::time_point, std::function<void()>> due_ ATTEND_GUARDED_BY(mutex_);
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend::client
