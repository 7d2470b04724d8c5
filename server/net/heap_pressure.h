// SPDX-License-Identifier: Apache-2.0
//
// How many calls a connection may have unanswered while the process's heap is larger than it should
// be. The heap includes what gRPC keeps for calls that have ended, whose number is unknown.
// Measures the heap now and then, and between two measurements counts every call as one of them.
// Thread-safe.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

#include "kernels/util/clock.h"

namespace attend {

class HeapPressure {
 public:
  using HeapBytes = std::function<int64_t()>;

  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

  // The heap should grow by no more than `growth_max` bytes from now on; a call takes `call_bytes`.
  // `clock` must outlive the object; it tells how long a measurement takes.
  HeapPressure(int64_t growth_max, int64_t call_bytes, const Clock& clock,
               HeapBytes heap_bytes = MallocBytes)
      : clock_(clock),
        heap_bytes_(std::move(heap_bytes)),
        call_bytes_(call_bytes),
        growth_max_(std::max<int64_t>(1, growth_max)),
        bytes_max_(heap_bytes_() + growth_max_) {}

  // A call begins. Returns kUnbounded while the heap is below its bound; above it, less and less
  // than `most`, down to one when the heap has grown by twice as much.
  int64_t CallsAllowed(TimePoint now, int64_t most);

  // Bytes allocated by malloc and not freed.
  static int64_t MallocBytes();

 private:
  const Clock& clock_;
  const HeapBytes heap_bytes_;
  const int64_t call_bytes_;
  const int64_t growth_max_;
  const int64_t bytes_max_;
  std::atomic<TimePoint> next_{TimePoint()};  // measurement
  std::atomic<int64_t> seen_bytes_{0};        // by the last measurement
  std::atomic<int64_t> calls_{0};             // begun since then
};

}  // namespace attend
