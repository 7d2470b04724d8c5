// SPDX-License-Identifier: Apache-2.0

#include "server/heap_pressure.h"

#include <malloc.h>

#include <chrono>

namespace attend {
namespace {

constexpr std::chrono::milliseconds kApart(10);
// malloc counts by walking through what is free, which may take long: a tenth of the time at most.
constexpr int kShare = 10;

}  // namespace

bool HeapPressure::High(TimePoint now) {
  TimePoint next = next_.load(std::memory_order_relaxed);
  // One of those who come at once looks; the others take what was seen last.
  if (now >= next && next_.compare_exchange_strong(next, now + kApart)) {
    const TimePoint began = std::chrono::steady_clock::now();
    high_.store(heap_bytes_() > bytes_max_, std::memory_order_relaxed);
    const auto took = std::chrono::steady_clock::now() - began;
    if (kShare * took > kApart) next_.store(now + kShare * took, std::memory_order_relaxed);
  }
  return high_.load(std::memory_order_relaxed);
}

int64_t HeapPressure::MallocBytes() {
  const struct mallinfo2 about = mallinfo2();
  return static_cast<int64_t>(about.uordblks + about.hblkhd);
}

}  // namespace attend
