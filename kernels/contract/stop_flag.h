// SPDX-License-Identifier: Apache-2.0
//
// Tells a running computation to end early. The computation checks it often enough to end within
// some milliseconds; what it has written by then is meaningless.

#pragma once

#include <atomic>

namespace attend {

// Set once, by any thread. A check costs one load, which other threads' checks do not slow down.
class StopFlag {
 public:
  void Set() { set_.store(true, std::memory_order_relaxed); }
  bool set() const { return set_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> set_{false};
};

// False if `stop` is null.
inline bool Stopped(const StopFlag* stop) { return stop != nullptr && stop->set(); }

}  // namespace attend
