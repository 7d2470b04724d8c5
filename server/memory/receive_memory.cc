// SPDX-License-Identifier: Apache-2.0

#include "server/memory/receive_memory.h"

namespace attend {

Result<std::unique_ptr<ReceiveMemory>> ReceiveMemory::Lock(HostAllocator& allocator,
                                                           const ReceiveBlocks& blocks) {
  if (blocks.bytes <= 0) {
    return InvalidArgument(
        "there are no blocks of gRPC's receive buffers: the allocator is not "
        "tuned, not glibc's, or got no address space");
  }
  ATTEND_RETURN_IF_ERROR(allocator.Register(blocks.begin, blocks.bytes));
  return std::unique_ptr<ReceiveMemory>(new ReceiveMemory(allocator, blocks));
}

}  // namespace attend
