// SPDX-License-Identifier: Apache-2.0
//
// Time as an injected dependency: product code is given a SteadyClock, tests a clock that they
// advance by hand.

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
  // For short pauses, and between two polls of other threads. A test clock may return at once.
  virtual void SleepFor(Duration duration) const { std::this_thread::sleep_for(duration); }
  // CondVar::Wait with a timeout: also ends once this clock has reached `until` (kNever: no
  // timeout). False: it timed out.
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
