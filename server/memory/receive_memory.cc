// SPDX-License-Identifier: Apache-2.0

#include "server/memory/receive_memory.h"

namespace attend {

Result<std::unique_ptr<ReceiveMemory>> ReceiveMemory::Lock(HostAllocator& allocator, void* begin,
                                                           int64_t bytes) {
  if (bytes <= 0) return InvalidArgument("no address space for --receive-memory");
  ATTEND_RETURN_IF_ERROR(allocator.Register(begin, bytes));
  return std::unique_ptr<ReceiveMemory>(new ReceiveMemory(allocator, begin, bytes));
}

}  // namespace attend
