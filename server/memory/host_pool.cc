// SPDX-License-Identifier: Apache-2.0

#include "server/memory/host_pool.h"

#include <algorithm>
#include <cassert>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace attend {
namespace {

// AddressSanitizer sees the pool's memory as one object; these tell it which bytes are not in use.
void Forbid([[maybe_unused]] char* data, [[maybe_unused]] int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(data, static_cast<size_t>(bytes));
#endif
}

void Allow([[maybe_unused]] char* data, [[maybe_unused]] int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(data, static_cast<size_t>(bytes));
#endif
}

}  // namespace

void HostBlock::Return::operator()(char* data) const { pool->Return(data, bytes); }

Result<std::unique_ptr<HostPool>> HostPool::Make(HostAllocator& allocator, int64_t budget_bytes) {
  if (budget_bytes < 0) {
    return InvalidArgument("memory budget is " + std::to_string(budget_bytes) +
                           " bytes, must be at least 0");
  }
  const Result<void*> memory = allocator.Allocate(budget_bytes);
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<HostPool>(
      new HostPool(allocator, static_cast<char*>(*memory), budget_bytes));
}

HostPool::HostPool(HostAllocator& allocator, char* memory, int64_t budget_bytes)
    : allocator_(allocator),
      memory_(memory),
      budget_bytes_(budget_bytes),
      ranges_(budget_bytes),
      untouched_end_(ranges_.capacity()) {}

HostPool::~HostPool() {
  assert(ranges_.used_bytes() == 0 && "a block outlived its pool");
  Allow(memory_, touched_end_);
  Allow(memory_ + untouched_end_, ranges_.capacity() - untouched_end_);
  allocator_.Free(memory_, budget_bytes_);
}

// What others use is told by the metrics.
Status HostPool::Refusal(int64_t bytes) const {
  return ResourceExhausted("tensor memory: request needs " + std::to_string(bytes) +
                           " bytes, the budget of " + std::to_string(budget_bytes_) +
                           " has no piece free that is so large");
}

Result<HostBlock> HostPool::Take(int64_t bytes) {
  HostBlock block;
  if (bytes == 0) return block;
  const int64_t rounded = RangeAllocator::RoundedBytes(bytes);
  int64_t begin = 0;
  {
    const MutexLock lock(mutex_);
    begin = ranges_.Take(bytes);
    if (begin < 0) return Refusal(bytes);
    if (begin >= untouched_end_ - rounded) {
      // It does not matter which end of the memory it came from: both bounds stay true.
      untouched_end_ = std::min(untouched_end_, begin);
    } else {
      touched_end_ = std::max(touched_end_, begin + rounded);
    }
  }
  char* const data = memory_ + begin;
  Allow(data, bytes);
  Forbid(data + bytes, rounded - bytes);
  block.data_ = {data, {this, bytes}};
  return block;
}

void HostPool::Return(char* data, int64_t bytes) {
  Forbid(data, RangeAllocator::RoundedBytes(bytes));
  const MutexLock lock(mutex_);
  ranges_.Return(data - memory_, bytes);
}

int64_t HostPool::used_bytes() const {
  const MutexLock lock(mutex_);
  return ranges_.used_bytes();
}

int64_t HostPool::largest_free_bytes() const {
  const MutexLock lock(mutex_);
  return ranges_.largest_free_bytes();
}

}  // namespace attend
