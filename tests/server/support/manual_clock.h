// SPDX-License-Identifier: Apache-2.0
//
// A clock that stands still until a test moves it: however slow the machine, no upload idles that
// the test does not mean. Not for calls with deadlines, which gRPC sees to by the true time.
// Thread-safe.

#pragma once

#include <atomic>
#include <thread>

#include "server/util/clock.h"

namespace attend::test {

class ManualClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Duration(now_.load())); }
  // Nobody would wake the sleeper, so it only lets others run.
  void SleepFor(Duration) const override { std::this_thread::yield(); }
  void Advance(Duration by) { now_.fetch_add(by.count()); }

 private:
  // Near the true time, which condition variables wait by.
  std::atomic<Duration::rep> now_ = std::chrono::steady_clock::now().time_since_epoch().count();
};

}  // namespace attend::test
