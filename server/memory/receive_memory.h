// SPDX-License-Identifier: Apache-2.0
//
// Receive buffers, page-locked, so that a GPU reads a message's tensors where they arrived and the
// server copies none of their bytes. The buffers are blocks of one range whose pages are never
// returned to the system: the own transport's (transport/block_pool.h), or gRPC's
// (proto/process/receive_blocks.h). When all of them are in use, messages arrive elsewhere and are
// copied as usual.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/contract/backend.h"
#include "proto/process/receive_blocks.h"

namespace attend {

class ReceiveMemory {
 public:
  // Page-locks `blocks` with `allocator` for this object's lifetime; both must outlive it.
  // INVALID_ARGUMENT if there are no blocks, RESOURCE_EXHAUSTED if the system does not allow that
  // much to be locked.
  static Result<std::unique_ptr<ReceiveMemory>> Lock(HostAllocator& allocator,
                                                     const ReceiveBlocks& blocks);
  ~ReceiveMemory() { allocator_.Unregister(blocks_.begin, blocks_.bytes); }
  ReceiveMemory(const ReceiveMemory&) = delete;
  ReceiveMemory& operator=(const ReceiveMemory&) = delete;

  int64_t bytes() const { return blocks_.bytes; }
  bool Contains(const void* data, int64_t bytes) const {
    const uint64_t offset =
        reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(blocks_.begin);
    return offset <= static_cast<uint64_t>(blocks_.bytes) &&
           bytes <= blocks_.bytes - static_cast<int64_t>(offset);
  }

 private:
  ReceiveMemory(HostAllocator& allocator, const ReceiveBlocks& blocks)
      : allocator_(allocator), blocks_(blocks) {}

  HostAllocator& allocator_;
  const ReceiveBlocks blocks_;
};

}  // namespace attend
