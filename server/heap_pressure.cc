// SPDX-License-Identifier: Apache-2.0

#include "server/heap_pressure.h"

#include <malloc.h>

#include <chrono>

namespace attend {
namespace {

constexpr std::chrono::milliseconds kLook(10);

}  // namespace

bool HeapPressure::High(TimePoint now) {
  TimePoint looked = looked_.load(std::memory_order_relaxed);
  // One of those who come at once looks; the others take what was seen last.
  if (now - looked >= kLook && looked_.compare_exchange_strong(looked, now)) {
    high_.store(heap_bytes_() > bytes_max_, std::memory_order_relaxed);
  }
  return high_.load(std::memory_order_relaxed);
}

int64_t HeapPressure::MallocBytes() {
  const struct mallinfo2 about = mallinfo2();
  return static_cast<int64_t>(about.uordblks + about.hblkhd);
}

}  // namespace attend
