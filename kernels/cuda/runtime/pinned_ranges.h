// SPDX-License-Identifier: Apache-2.0
//
// Host memory known by one allocator to be page-locked and mapped for the GPUs. A lookup takes
// nanoseconds; asking CUDA takes a driver call per span. Thread-safe.

#pragma once

#include <cstdint>
#include <map>

#include "kernels/util/mutex.h"

namespace attend::cuda {

class PinnedRanges {
 public:
  void Add(const void* data, int64_t bytes);
  void Remove(const void* data);  // `data` as passed to Add
  bool Contain(const void* data, int64_t bytes) const;

 private:
  mutable SharedMutex mutex_;
  std::map<uintptr_t, int64_t> bytes_of_ ATTEND_GUARDED_BY(mutex_);  // by first address
};

}  // namespace attend::cuda
