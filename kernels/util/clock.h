// SPDX-License-Identifier: Apache-2.0
//
// Time as a dependency. Product code is given SteadyClock; tests advance their own clock by hand.

#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "kernels/util/mutex.h"

namespace attend {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

inline constexpr TimePoint kNever = TimePoint::max();

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
  // For pauses, and between two looks at what other threads do. By a clock that a test moves it may
  // return at once.
  virtual void SleepFor(Duration duration) const { std::this_thread::sleep_for(duration); }
  // CondVar::Wait that also ends when `until` has come by this clock; kNever: it does not. False:
  // the time has come.
  virtual bool WaitUntil(CondVar& changed, Mutex& mutex, TimePoint until) const
      ATTEND_REQUIRES(mutex) {
    if (until != kNever) return changed.WaitUntil(mutex, until);
    changed.Wait(mutex);
    return true;
  }
};

class SteadyClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

inline int64_t NanosecondsBetween(TimePoint from, TimePoint to) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}

}  // namespace attend
