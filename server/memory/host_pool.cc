// SPDX-License-Identifier: Apache-2.0
//
// One RangeAllocator per tenant and one for the common rest, over adjacent parts of one allocation.
// Take tries the tenant's own part, then the common one; a block never spans two. A block remembers
// its part, so Return needs no search. To AddressSanitizer the pool is one object; it is told which
// bytes are not in use.

#include "server/memory/host_pool.h"

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cassert>
#include <string>
#include <tuple>

namespace attend {

void HostBlock::Return::operator()(char* data) const { pool->Return(data, bytes, part); }

Result<std::unique_ptr<HostPool>> HostPool::Make(HostAllocator& allocator, int64_t budget_bytes,
                                                 const TenantWeights& tenant_weights) {
  if (budget_bytes < 0) {
    return InvalidArgument("memory budget is " + std::to_string(budget_bytes) +
                           " bytes, must be at least 0");
  }
  const Result<void*> memory = allocator.Allocate(budget_bytes);
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<HostPool>(
      new HostPool(allocator, static_cast<char*>(*memory), budget_bytes, tenant_weights));
}

HostPool::HostPool(HostAllocator& allocator, char* memory, int64_t budget_bytes,
                   const TenantWeights& tenant_weights)
    : allocator_(allocator),
      memory_(memory),
      budget_bytes_(budget_bytes),
      division_(DivideByWeight(budget_bytes, tenant_weights, RangeAllocator::kUnitBytes)),
      untouched_end_(budget_bytes / RangeAllocator::kUnitBytes * RangeAllocator::kUnitBytes) {
  int64_t begin = 0;
  for (const int64_t own_bytes : division_.own) {
    parts_.emplace_back(begin, own_bytes);
    begin += own_bytes;
  }
  parts_.emplace_back(begin, budget_bytes - begin);
}

HostPool::~HostPool() {
  assert(used_bytes() == 0 && "a block outlived its pool");
  ASAN_UNPOISON_MEMORY_REGION(memory_, touched_end_);
  ASAN_UNPOISON_MEMORY_REGION(memory_ + untouched_end_, budget_bytes_ - untouched_end_);
  allocator_.Free(memory_, budget_bytes_);
}

// The message does not reveal other tenants' use; metrics show it.
Status HostPool::Refusal(int tenant, int64_t bytes) const {
  const int64_t own_bytes = division_.own[tenant];
  return ResourceExhausted(
      "tensor memory: request needs " + std::to_string(bytes) + " bytes, the memory budget of " +
      std::to_string(budget_bytes_) + " has no free block that large" +
      (own_bytes == 0 ? std::string()
                      : ", neither in the tenant's own " + std::to_string(own_bytes) +
                            " nor in the common " + std::to_string(division_.common)));
}

std::pair<size_t, int64_t> HostPool::TakeLocked(int tenant, int64_t bytes) {
  for (const size_t index : {static_cast<size_t>(tenant), parts_.size() - 1}) {
    Part& part = parts_[index];
    const int64_t at = part.ranges.Take(bytes);
    if (at >= 0) return {index, part.begin + at};
  }
  return {0, -1};
}

bool HostPool::CouldTake(int tenant, int64_t one_bytes, int64_t other_bytes) const {
  int64_t own = division_.own[tenant];
  int64_t common = division_.common;
  for (const int64_t bytes : {BlockBytes(one_bytes), BlockBytes(other_bytes)}) {
    int64_t& part = bytes <= own ? own : common;
    if (bytes > part) return false;
    part -= bytes;
  }
  return true;
}

Result<HostBlock> HostPool::Take(int tenant, int64_t bytes) {
  HostBlock block;
  if (bytes == 0) return block;
  const int64_t rounded = RangeAllocator::RoundedBytes(bytes);
  size_t part = 0;
  int64_t begin = 0;
  {
    const MutexLock lock(mutex_);
    std::tie(part, begin) = TakeLocked(tenant, bytes);
    if (begin < 0) return Refusal(tenant, bytes);
    if (begin >= untouched_end_ - rounded) {
      // Either bound may be moved: both stay true whichever end the range came from.
      untouched_end_ = std::min(untouched_end_, begin);
    } else {
      touched_end_ = std::max(touched_end_, begin + rounded);
    }
  }
  char* const data = memory_ + begin;
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  ASAN_POISON_MEMORY_REGION(data + bytes, rounded - bytes);
  block.data_ = {data, {this, bytes, part}};
  return block;
}

void HostPool::Return(char* data, int64_t bytes, size_t index) {
  ASAN_POISON_MEMORY_REGION(data, RangeAllocator::RoundedBytes(bytes));
  const MutexLock lock(mutex_);
  Part& part = parts_[index];
  part.ranges.Return(data - memory_ - part.begin, bytes);
}

int64_t HostPool::used_bytes() const {
  const MutexLock lock(mutex_);
  int64_t used_bytes = 0;
  for (const Part& part : parts_) used_bytes += part.ranges.used_bytes();
  return used_bytes;
}

int64_t HostPool::largest_free_bytes() const {
  const MutexLock lock(mutex_);
  int64_t largest_bytes = 0;
  for (const Part& part : parts_) {
    largest_bytes = std::max(largest_bytes, part.ranges.largest_free_bytes());
  }
  return largest_bytes;
}

}  // namespace attend
