// SPDX-License-Identifier: Apache-2.0
//
// Free ranges are indexed twice, by offset and by (size, offset). Take finds the best fit with one
// lower_bound in the second; Return merges with both neighbours by the first. Invariants: both hold
// the same ranges, and no two free ranges are adjacent.

#include "server/memory/range_allocator.h"

#include <algorithm>
#include <cassert>
#include <iterator>

#include "server/util/thresholds.h"

namespace attend {

RangeAllocator::RangeAllocator(int64_t capacity)
    : capacity_(std::max<int64_t>(0, capacity) / kUnitBytes * kUnitBytes) {
  if (capacity_ > 0) AddFree(0, capacity_);
}

int64_t RangeAllocator::RoundedBytes(int64_t bytes) {
  if (bytes > INT64_MAX - kUnitBytes) return bytes;
  return (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}

void RangeAllocator::AddFree(int64_t begin, int64_t bytes) {
  by_begin_.emplace(begin, bytes);
  by_bytes_.emplace(bytes, begin);
}

void RangeAllocator::RemoveFree(std::pmr::map<int64_t, int64_t>::iterator range) {
  by_bytes_.erase({range->second, range->first});
  by_begin_.erase(range);
}

int64_t RangeAllocator::Take(int64_t bytes) {
  assert(bytes > 0);
  const int64_t rounded = RoundedBytes(bytes);
  const auto best = by_bytes_.lower_bound({rounded, 0});
  if (best == by_bytes_.end()) return -1;
  const auto [free_bytes, free_begin] = *best;
  RemoveFree(by_begin_.find(free_begin));
  const int64_t rest = free_bytes - rounded;
  const bool small = rounded <= thresholds::kSmallRangeBytesMax;
  if (rest > 0) AddFree(small ? free_begin : free_begin + rounded, rest);
  used_bytes_ += rounded;
  return small ? free_begin + rest : free_begin;
}

void RangeAllocator::Return(int64_t begin, int64_t bytes) {
  bytes = RoundedBytes(bytes);
  used_bytes_ -= bytes;
  const auto next = by_begin_.lower_bound(begin);
  assert(next == by_begin_.end() || begin + bytes <= next->first);
  int64_t end = begin + bytes;
  if (next != by_begin_.begin()) {
    const auto before = std::prev(next);
    assert(before->first + before->second <= begin);
    if (before->first + before->second == begin) {
      begin = before->first;
      RemoveFree(before);
    }
  }
  if (next != by_begin_.end() && next->first == end) {
    end += next->second;
    RemoveFree(next);
  }
  AddFree(begin, end - begin);
}

int64_t RangeAllocator::largest_free_bytes() const {
  return by_bytes_.empty() ? 0 : by_bytes_.rbegin()->first;
}

}  // namespace attend
