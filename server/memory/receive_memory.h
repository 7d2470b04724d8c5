// SPDX-License-Identifier: Apache-2.0
//
// The page-locked range that large messages are read into (transport/block_pool.h), so that a GPU
// reads tensors where they arrived and the server copies none of their bytes. When all of it is in
// use, messages are received elsewhere and copied as usual.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"

namespace attend {

class ReceiveMemory {
 public:
  // Page-locks `bytes` from `begin` with `allocator` for this object's lifetime; both must outlive
  // it. INVALID_ARGUMENT if `bytes` is not positive, RESOURCE_EXHAUSTED if the system does not
  // allow that much to be locked.
  static Result<std::unique_ptr<ReceiveMemory>> Lock(HostAllocator& allocator, void* begin,
                                                     int64_t bytes);
  ~ReceiveMemory() { allocator_.Unregister(begin_, bytes_); }
  ReceiveMemory(const ReceiveMemory&) = delete;
  ReceiveMemory& operator=(const ReceiveMemory&) = delete;

  int64_t bytes() const { return bytes_; }
  bool Contains(const void* data, int64_t bytes) const {
    const uint64_t offset = reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(begin_);
    return offset <= static_cast<uint64_t>(bytes_) &&
           bytes <= bytes_ - static_cast<int64_t>(offset);
  }

 private:
  ReceiveMemory(HostAllocator& allocator, void* begin, int64_t bytes)
      : allocator_(allocator), begin_(begin), bytes_(bytes) {}

  HostAllocator& allocator_;
  void* const begin_;
  const int64_t bytes_;
};

}  // namespace attend
