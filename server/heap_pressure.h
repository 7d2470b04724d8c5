// SPDX-License-Identifier: Apache-2.0
//
// Whether the process's heap holds more than it should. What gRPC keeps for calls that have ended
// lies there, and nothing says how many these are. Looks now and then. Any thread.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "server/clock.h"

namespace attend {

class HeapPressure {
 public:
  using HeapBytes = std::function<int64_t()>;

  // High above `growth_max` bytes more than now.
  explicit HeapPressure(int64_t growth_max, HeapBytes heap_bytes = MallocBytes)
      : heap_bytes_(std::move(heap_bytes)), bytes_max_(heap_bytes_() + growth_max) {}

  bool High(TimePoint now);

  // What malloc has given out and not taken back.
  static int64_t MallocBytes();

 private:
  const HeapBytes heap_bytes_;
  const int64_t bytes_max_;
  std::atomic<TimePoint> next_{TimePoint()};  // look
  std::atomic<bool> high_{false};
};

}  // namespace attend
