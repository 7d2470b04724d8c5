// SPDX-License-Identifier: Apache-2.0
//
// A clock that stands still until a test moves it: however slow the machine, an upload idles only
// when the test wants it to. gRPC still enforces calls' deadlines in real time. Thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/util/clock.h"

namespace attend::test {

class ManualClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Duration(now_.load())); }
  // The sleeper would never be woken, so it only yields.
  void SleepFor(Duration) const override { std::this_thread::yield(); }
  // Advance does not know the waiting threads, so this wakes repeatedly. It returns each time: a
  // notification that came just then would be lost if it kept waiting.
  bool WaitUntil(CondVar& changed, Mutex& mutex, TimePoint until) const override
      ATTEND_REQUIRES(mutex) {
    if (until == kNever) return Clock::WaitUntil(changed, mutex, until);
    ++waits_;
    if (Now() < until) {
      changed.WaitUntil(mutex, std::chrono::steady_clock::now() + std::chrono::milliseconds(1));
    }
    return Now() < until;
  }
  void Advance(Duration by) { now_.fetch_add(by.count()); }
  // Returns when a thread waits until a time.
  void AwaitWaiter() const {
    for (const int64_t before = waits_; waits_ == before;) std::this_thread::yield();
  }

 private:
  mutable std::atomic<int64_t> waits_ = 0;
  std::atomic<Duration::rep> now_ = std::chrono::steady_clock::now().time_since_epoch().count();
};

}  // namespace attend::test
