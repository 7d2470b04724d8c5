// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/pinned_ranges.h"

#include <iterator>

namespace attend::cuda {

void PinnedRanges::Add(const void* data, int64_t bytes) {
  const WriterLock lock(mutex_);
  bytes_of_[reinterpret_cast<uintptr_t>(data)] = bytes;
}

void PinnedRanges::Remove(const void* data) {
  const WriterLock lock(mutex_);
  bytes_of_.erase(reinterpret_cast<uintptr_t>(data));
}

bool PinnedRanges::Contain(const void* data, int64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const ReaderLock lock(mutex_);
  const auto after = bytes_of_.upper_bound(address);
  if (after == bytes_of_.begin() || bytes < 0) return false;
  const auto& [begin, size] = *std::prev(after);
  const auto offset = static_cast<int64_t>(address - begin);
  return offset <= size && bytes <= size - offset;
}

}  // namespace attend::cuda
