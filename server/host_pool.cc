// SPDX-License-Identifier: Apache-2.0

#include "server/host_pool.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace attend {
namespace {

constexpr int64_t kSmallestClassBytes = 1024;
constexpr int64_t kPowerOfTwoClassesUpToBytes = 4096;
// Nobody has more, and rounding up further would overflow.
constexpr int64_t kLargestClassBytes = int64_t{1} << 61;

}  // namespace

HostBlock& HostBlock::operator=(HostBlock&& other) noexcept {
  if (this == &other) return *this;
  Release();
  pool_ = std::exchange(other.pool_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  class_bytes_ = std::exchange(other.class_bytes_, 0);
  return *this;
}

void HostBlock::Release() {
  if (pool_ != nullptr) pool_->Return(data_, class_bytes_);
  pool_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
  class_bytes_ = 0;
}

HostPool::HostPool(HostAllocator& allocator, int64_t budget_bytes)
    : allocator_(allocator), budget_bytes_(budget_bytes) {}

HostPool::~HostPool() {
  assert(used_bytes_ == 0 && "a block outlived its pool");
  for (const auto& [class_bytes, blocks] : cached_) {
    for (void* data : blocks) allocator_.Free(data, class_bytes);
  }
}

int64_t HostPool::ClassBytes(int64_t bytes) {
  if (bytes <= kSmallestClassBytes) return kSmallestClassBytes;
  if (bytes > kLargestClassBytes) return bytes;
  const int64_t power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  if (power <= kPowerOfTwoClassesUpToBytes) return power;
  // Four classes between powers of two: reuse stays likely, waste stays under a quarter.
  const int64_t step = power / 8;
  return (bytes + step - 1) / step * step;
}

std::vector<std::pair<void*, int64_t>> HostPool::EvictLocked(int64_t bytes) {
  std::vector<std::pair<void*, int64_t>> evicted;
  while (used_bytes_ + cached_bytes_ + bytes > budget_bytes_ && !cached_.empty()) {
    const auto largest = std::prev(cached_.end());
    evicted.emplace_back(largest->second.back(), largest->first);
    cached_bytes_ -= largest->first;
    largest->second.pop_back();
    if (largest->second.empty()) cached_.erase(largest);
  }
  return evicted;
}

Result<HostBlock> HostPool::Take(int64_t bytes) {
  HostBlock block;
  if (bytes == 0) return block;
  const int64_t class_bytes = ClassBytes(bytes);
  std::vector<std::pair<void*, int64_t>> evicted;
  void* data = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (class_bytes > budget_bytes_ - used_bytes_) {
      return ResourceExhausted("tensor memory: request needs " + std::to_string(bytes) +
                               " bytes, " + std::to_string(used_bytes_) + " of the budget of " +
                               std::to_string(budget_bytes_) + " are in use");
    }
    if (const auto found = cached_.find(class_bytes); found != cached_.end()) {
      data = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) cached_.erase(found);
      cached_bytes_ -= class_bytes;
    } else {
      evicted = EvictLocked(class_bytes);
    }
    used_bytes_ += class_bytes;  // reserved, also while the allocation below runs unlocked
  }
  for (const auto& [old, old_bytes] : evicted) allocator_.Free(old, old_bytes);
  if (data == nullptr) {
    Result<void*> allocated = allocator_.Allocate(class_bytes);
    if (!allocated.ok()) {
      std::lock_guard lock(mutex_);
      used_bytes_ -= class_bytes;
      return allocated.status();
    }
    data = *allocated;
  }
  block.pool_ = this;
  block.data_ = data;
  block.bytes_ = bytes;
  block.class_bytes_ = class_bytes;
  return block;
}

void HostPool::Return(void* data, int64_t class_bytes) {
  std::lock_guard lock(mutex_);
  used_bytes_ -= class_bytes;
  cached_bytes_ += class_bytes;
  cached_[class_bytes].push_back(data);
}

int64_t HostPool::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

int64_t HostPool::cached_bytes() const {
  std::lock_guard lock(mutex_);
  return cached_bytes_;
}

int64_t HostPool::held_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_ + cached_bytes_;
}

}  // namespace attend
