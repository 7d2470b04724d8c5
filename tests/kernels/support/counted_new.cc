// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/counted_new.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace attend::test {
namespace {

thread_local int64_t held_bytes = 0;
thread_local int64_t peak_bytes = 0;
// More calls than any new-handler needs to free memory.
constexpr int kLastingFailures = 20;

std::atomic<int64_t> left{0};  // allocations until the one that fails; 0: none does
std::atomic<bool (*)()> counts{nullptr};
thread_local bool spared = false;

bool Fails() {
  if (left.load(std::memory_order_relaxed) <= 0) return false;
  if (const auto counted = counts.load(); counted != nullptr) {
    if (spared) return false;
    spared = true;  // its own allocations
    const bool counts_here = counted();
    spared = false;
    if (!counts_here) return false;
  }
  return left.fetch_sub(1, std::memory_order_relaxed) == 1;
}

void* Take(size_t bytes, size_t alignment) {
  void* const data = alignment <= alignof(std::max_align_t) ? std::malloc(bytes)
                                                            : std::aligned_alloc(alignment, bytes);
  if (data == nullptr) return nullptr;
  held_bytes += static_cast<int64_t>(malloc_usable_size(data));
  peak_bytes = std::max(peak_bytes, held_bytes);
  return data;
}

// As the standard requires: the new-handler may free memory.
void* TakeOrThrow(size_t bytes, size_t alignment) {
  int failures = !Fails() ? 0 : counts.load() == nullptr ? 1 : kLastingFailures;
  for (;; --failures) {
    void* const data = failures > 0 ? nullptr : Take(bytes, alignment);
    if (data != nullptr) return data;
    const std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) throw std::bad_alloc();
    handler();
  }
}

void* TakeOrNull(size_t bytes) { return Fails() ? nullptr : Take(bytes, 1); }

void Give(void* data) {
  if (data != nullptr) held_bytes -= static_cast<int64_t>(malloc_usable_size(data));
  std::free(data);
}

size_t Rounded(size_t bytes, std::align_val_t alignment) {
  const auto step = static_cast<size_t>(alignment);
  return (bytes + step - 1) / step * step;
}

}  // namespace

HeapWatch::HeapWatch() { attend::test::held_bytes = attend::test::peak_bytes = 0; }
int64_t HeapWatch::held_bytes() const { return attend::test::held_bytes; }
int64_t HeapWatch::peak_bytes() const { return attend::test::peak_bytes; }

HeapFault::HeapFault(int64_t nth, bool (*only)()) {
  spared = true;
  counts.store(only);
  left.store(nth);
}
HeapFault::~HeapFault() {
  left.store(0);
  counts.store(nullptr);
  spared = false;
}
bool HeapFault::reached() const { return left.load() <= 0; }

}  // namespace attend::test

using attend::test::Give;
using attend::test::Rounded;
using attend::test::TakeOrNull;
using attend::test::TakeOrThrow;

void* operator new(size_t bytes) { return TakeOrThrow(bytes, 1); }
void* operator new[](size_t bytes) { return TakeOrThrow(bytes, 1); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return TakeOrNull(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return TakeOrNull(bytes); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return TakeOrThrow(Rounded(bytes, alignment), static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return TakeOrThrow(Rounded(bytes, alignment), static_cast<size_t>(alignment));
}
void operator delete(void* data) noexcept { Give(data); }
void operator delete[](void* data) noexcept { Give(data); }
void operator delete(void* data, size_t) noexcept { Give(data); }
void operator delete[](void* data, size_t) noexcept { Give(data); }
void operator delete(void* data, std::align_val_t) noexcept { Give(data); }
void operator delete[](void* data, std::align_val_t) noexcept { Give(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { Give(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { Give(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { Give(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { Give(data); }
