// SPDX-License-Identifier: Apache-2.0
//
// A clock that stands still until a test moves it: however slow the machine, no upload idles that
// the test does not mean. gRPC sees to the deadlines of calls by the true time all the same.
// Thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/util/clock.h"

namespace attend::test {

class ManualClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Duration(now_.load())); }
  // Nobody would wake the sleeper, so it only lets others run.
  void SleepFor(Duration) const override { std::this_thread::yield(); }
  // Advance does not know who waits, so this wakes again and again. It returns each time: a
  // notification that came just then would be lost if it waited on.
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
  // Returns when somebody waits until a time.
  void AwaitWaiter() const {
    for (const int64_t before = waits_; waits_ == before;) std::this_thread::yield();
  }

 private:
  mutable std::atomic<int64_t> waits_ = 0;
  std::atomic<Duration::rep> now_ = std::chrono::steady_clock::now().time_since_epoch().count();
};

}  // namespace attend::test
