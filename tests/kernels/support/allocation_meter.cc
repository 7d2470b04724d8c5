// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/allocation_meter.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> live_bytes = 0;
std::atomic<int64_t> most_bytes = 0;

}  // namespace

// std::stable_sort allocates its buffer this way.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  void* const block = std::malloc(bytes);
  if (block == nullptr) return nullptr;
  const int64_t live = live_bytes += static_cast<int64_t>(malloc_usable_size(block));
  if (live > most_bytes) most_bytes = live;
  return block;
}

void* operator new(size_t bytes) {
  void* const block = operator new(bytes, std::nothrow);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void operator delete(void* block) noexcept {
  live_bytes -= static_cast<int64_t>(malloc_usable_size(block));
  std::free(block);
}

void operator delete(void* block, size_t) noexcept { operator delete(block); }

namespace attend::test {

int64_t MostAllocated(const std::function<void()>& body) {
  const int64_t before = live_bytes;
  most_bytes = before;
  body();
  return most_bytes - before;
}

}  // namespace attend::test
