// SPDX-License-Identifier: Apache-2.0
//
// Blocks for gRPC's receive buffers. gRPC reads from its connections into buffers of 64 KiB and 8
// KiB, which it allocates with malloc on one thread and frees on another; it has no allocator hook.
// glibc's heaps suit neither: with many arenas buffers drift from one to the next, with one all
// threads contend for its lock. So a program that links this (attend_receive_blocks) replaces
// malloc: requests of these two sizes are served from stacks of blocks (block_stack.h) in one
// address range, all others go to the next malloc. Used blocks are reused first, and their memory
// never returns to the system.
//
// A buffer for which there is no free block comes from malloc's own heap.

#pragma once

#include <cstdint>
#include <cstdlib>  // __GLIBC__

// Sanitizers replace malloc themselves and must see all memory.
#if defined(__has_feature)
#define ATTEND_HAS_FEATURE(name) __has_feature(name)
#else
#define ATTEND_HAS_FEATURE(name) 0
#endif
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_HWADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !ATTEND_HAS_FEATURE(address_sanitizer) &&                  \
    !ATTEND_HAS_FEATURE(hwaddress_sanitizer) && !ATTEND_HAS_FEATURE(memory_sanitizer) &&        \
    !ATTEND_HAS_FEATURE(thread_sanitizer)
#define ATTEND_MALLOC_HAS_BLOCKS 1
#else
#define ATTEND_MALLOC_HAS_BLOCKS 0
#endif

namespace attend {

constexpr bool kMallocHasBlocks = ATTEND_MALLOC_HAS_BLOCKS != 0;

struct ReceiveBlocks {
  void* begin = nullptr;  // page-aligned
  int64_t bytes = 0;      // whole pages; 0: none
};

constexpr int64_t kReceiveBlocksBytes = int64_t{1} << 30;

// Reserves address space for blocks, `bytes` rounded up to 2 MiB; it becomes memory as it is used.
// Until then malloc is unchanged. main calls this once; further calls return the same blocks.
// Returns none for 0 bytes, if the system refuses the address space, or without kMallocHasBlocks.
ReceiveBlocks ReserveReceiveBlocks(int64_t bytes);

// ReserveReceiveBlocks plus TuneAllocator (process_settings.h): with `arenas` if there are blocks,
// else with one, because each arena would keep buffers of its own. In all but the first arena glibc
// maps pieces of 64 MiB and more individually, so several arenas suit only processes with tensor
// memory of their own.
struct TunedAllocator {
  bool tuned = false;
  ReceiveBlocks blocks;
};
TunedAllocator TuneAllocatorAndBlocks(int64_t bytes = kReceiveBlocksBytes, int arenas = 1);

}  // namespace attend
