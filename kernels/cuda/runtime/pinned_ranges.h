// SPDX-License-Identifier: Apache-2.0
//
// Which host memory is page-locked and mapped for the GPUs, as far as one allocator knows. A lookup
// takes nanoseconds; asking CUDA takes a driver call per span. Thread-safe.

#pragma once

#include <cstdint>
#include <map>

#include "kernels/util/mutex.h"

namespace attend::cuda {

class PinnedRanges {
 public:
  void Add(const void* data, int64_t bytes);
  void Remove(const void* data);  // as it was added
  // Whether all of it is in one range.
  bool Contain(const void* data, int64_t bytes) const;

 private:
  mutable SharedMutex mutex_;
  std::map<uintptr_t, int64_t> bytes_of_ ATTEND_GUARDED_BY(mutex_);  // by first address
};

}  // namespace attend::cuda
