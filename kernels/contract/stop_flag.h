// SPDX-License-Identifier: Apache-2.0
//
// How a computation that runs is told to end early. It looks often enough to end within some
// milliseconds, and what it has written by then means nothing.

#pragma once

#include <atomic>

namespace attend {

// Set once, by any thread. A look costs a load that other threads' looks do not disturb.
class StopFlag {
 public:
  void Set() { set_.store(true, std::memory_order_relaxed); }
  bool set() const { return set_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> set_{false};
};

// Null is never set.
inline bool Stopped(const StopFlag* stop) { return stop != nullptr && stop->set(); }

}  // namespace attend
