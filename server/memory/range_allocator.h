// SPDX-License-Identifier: Apache-2.0
//
// Best-fit allocator of ranges in [0, capacity). A returned range is merged with its free
// neighbours at once, so an idle allocator is one free range again. Small ranges are cut from the
// end of a free range, large ones from its beginning, so that short-lived small ranges do not
// fragment the space for large ones. Pure arithmetic; not thread-safe. Take and Return are O(log n)
// in the number of holes.

#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <set>
#include <utility>

namespace attend {

// Tensors are aligned to this in every memory.
inline constexpr int64_t kTensorAlignBytes = 256;

class RangeAllocator {
 public:
  static constexpr int64_t kUnitBytes =
      kTensorAlignBytes;  // every range begins at a multiple of it

  explicit RangeAllocator(int64_t capacity);  // rounded down to whole units

  // The size of a range for `bytes` > 0; INT64_MAX is not rounded.
  static int64_t RoundedBytes(int64_t bytes);

  // The offset of a range of RoundedBytes(bytes), now taken; -1 if there is none.
  int64_t Take(int64_t bytes);
  // Returns the range that Take(bytes) gave.
  void Return(int64_t begin, int64_t bytes);

  int64_t capacity() const { return capacity_; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t largest_free_bytes() const;

 private:
  void AddFree(int64_t begin, int64_t bytes);
  void RemoveFree(std::pmr::map<int64_t, int64_t>::iterator range);

  const int64_t capacity_;
  int64_t used_bytes_ = 0;
  // Recycles the nodes of both containers: malloc could block on other threads while the caller
  // holds a lock. Grows to the largest number of holes so far, and never shrinks.
  std::pmr::unsynchronized_pool_resource nodes_;
  // Free ranges, begin to bytes; never adjacent.
  std::pmr::map<int64_t, int64_t> by_begin_{&nodes_};
  std::pmr::set<std::pair<int64_t, int64_t>> by_bytes_{&nodes_};  // the same as (bytes, begin)
};

}  // namespace attend
