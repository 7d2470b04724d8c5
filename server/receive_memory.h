// SPDX-License-Identifier: Apache-2.0
//
// gRPC's receive buffers, page-locked, so that a GPU reads a message's tensors where they arrived
// and the server copies none of their bytes. gRPC takes its buffers from malloc and has no hook for
// another allocator; but with one arena that gives nothing back (proto/process_settings.h) glibc's
// heap is one range that only grows. So it is made to grow at the start, and what it grew by is
// page-locked and handed back to malloc. Buffers that come from elsewhere, once all of that is in
// use, are copied as ever.
//
// The pages must stay where they are while a GPU may read them: nothing may give them back to the
// system, or the GPU would go on reading the old ones. So glibc's trim threshold is off from then
// on, and another malloc is refused.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/backend.h"

namespace attend {

class ReceiveMemory {
 public:
  // Page-locks `bytes` of the heap by `allocator`, which outlives this. Null, and
  // `why` says so, where the heap is not glibc's or does not grow in one piece. Before other
  // threads begin to take much from it.
  static std::unique_ptr<ReceiveMemory> Make(HostAllocator& allocator, int64_t bytes,
                                             std::string* why);
  // A range that is somebody else's.
  ReceiveMemory(const void* begin, int64_t bytes) : begin_(begin), bytes_(bytes) {}
  ~ReceiveMemory();
  ReceiveMemory(const ReceiveMemory&) = delete;
  ReceiveMemory& operator=(const ReceiveMemory&) = delete;

  int64_t bytes() const { return bytes_; }
  bool Contains(const void* data, int64_t bytes) const {
    const uint64_t offset = reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(begin_);
    return offset <= static_cast<uint64_t>(bytes_) &&
           bytes <= bytes_ - static_cast<int64_t>(offset);
  }

 private:
  const void* const begin_;
  const int64_t bytes_;
  HostAllocator* allocator_ = nullptr;  // that locked it, if it is this object's
};

}  // namespace attend
