// SPDX-License-Identifier: Apache-2.0
//
// Asks a running computation to end early. It polls the flag often enough to end within a few
// milliseconds; its output is then meaningless.

#pragma once

#include <atomic>

namespace attend {

// Set once, by any thread. A poll is one relaxed load of a cache line that nothing else writes.
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
