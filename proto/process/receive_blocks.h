// SPDX-License-Identifier: Apache-2.0
//
// Where gRPC's receive buffers come from. gRPC reads from its connections into buffers of 64 KiB
// and 8 KiB, which it takes from malloc on one thread and frees on another, with no hook for
// another allocator. glibc's heaps are made for neither: with many arenas buffers wander from one
// to the next, with one all threads wait for its lock. So malloc itself, in programs that link this
// (attend_receive_blocks), gives requests of these two sizes from stacks of blocks (block_stack.h)
// in one range of memory, and passes all others on. Blocks that were in use are used again first,
// none of their memory ever goes back to the system, and the range may be page-locked: then a GPU
// reads a message's tensors where they arrived.
//
// A buffer for which there is no block comes from malloc's own heap, as usual.

#pragma once

#include <cstdint>
#include <cstdlib>  // says which C library it is

// A sanitizer has a malloc of its own, which must see all memory.
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
  void* begin = nullptr;  // on a page's boundary
  int64_t bytes = 0;      // whole pages; 0: there are none
};

constexpr int64_t kReceiveBlocksBytes = int64_t{1} << 30;

// Makes the blocks, of `bytes` in all, in whole 2 MiB: address space, that becomes memory as it is
// used. Until then malloc is the next one's. Once for a process, by main; asked again, what there
// is. None of 0 bytes, if the system refuses the address space, or without kMallocHasBlocks.
ReceiveBlocks ReserveReceiveBlocks(int64_t bytes);

// That, and process_settings.h's TuneAllocator: with these arenas if there are blocks, else with
// one, as each would keep buffers of its own. glibc maps pieces of 64 MiB and more one by one in
// all but the first arena, which suits servers alone: they have memory of their own for tensors.
struct TunedAllocator {
  bool tuned = false;
  ReceiveBlocks blocks;
};
TunedAllocator TuneAllocatorAndBlocks(int64_t bytes = kReceiveBlocksBytes, int arenas = 1);

}  // namespace attend
