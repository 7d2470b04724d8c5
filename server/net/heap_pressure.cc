// SPDX-License-Identifier: Apache-2.0

#include "server/net/heap_pressure.h"

#include <malloc.h>

#include <chrono>
#include <cmath>

namespace attend {
namespace {

constexpr std::chrono::milliseconds kApart(10);
// malloc counts by walking through what is free, which may take long: a tenth of the time at most.
constexpr int kShare = 10;

}  // namespace

int64_t HeapPressure::CallsAllowed(TimePoint now, int64_t most) {
  calls_.fetch_add(1, std::memory_order_relaxed);
  TimePoint next = next_.load(std::memory_order_relaxed);
  // If several threads come at once, one looks; the others take what was seen last.
  if (now >= next && next_.compare_exchange_strong(next, now + kApart)) {
    const TimePoint began = clock_.Now();
    calls_.store(1, std::memory_order_relaxed);
    seen_bytes_.store(heap_bytes_(), std::memory_order_relaxed);
    const Duration took = clock_.Now() - began;
    if (kShare * took > kApart) next_.store(now + kShare * took, std::memory_order_relaxed);
  }
  const int64_t above = seen_bytes_.load(std::memory_order_relaxed) +
                        call_bytes_ * calls_.load(std::memory_order_relaxed) - bytes_max_;
  if (above <= 0) return kUnbounded;
  const double left = 1 - static_cast<double>(above) / static_cast<double>(growth_max_);
  return std::max<int64_t>(1, std::llround(std::ceil(static_cast<double>(most) * left)));
}

int64_t HeapPressure::MallocBytes() {
  const struct mallinfo2 about = mallinfo2();
  return static_cast<int64_t>(about.uordblks + about.hblkhd);
}

}  // namespace attend
