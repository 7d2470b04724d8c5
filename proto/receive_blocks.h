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
// A buffer for which there is no block comes from malloc's own heap, as ever.

#pragma once

#include <cstdint>

namespace attend {

struct ReceiveBlocks {
  void* begin = nullptr;  // on a page's boundary
  int64_t bytes = 0;      // whole pages; 0: there are none
};

constexpr int64_t kReceiveBlocksBytes = int64_t{1} << 30;

// Makes the blocks, of some `bytes` in all: address space, that becomes memory as it is used. Until
// then malloc is the next one's. Once for a process, by main; asked again, what there is. None if
// the system refuses the address space, `bytes` hold no block, or a sanitizer's malloc is at work.
ReceiveBlocks ReserveReceiveBlocks(int64_t bytes);

// That, with kReceiveBlocksBytes for 0, and process_settings.h's TuneAllocator with the arenas that
// suit what came of it.
struct TunedAllocator {
  bool tuned = false;
  ReceiveBlocks blocks;
};
TunedAllocator TuneAllocatorAndBlocks(int64_t bytes = 0);

}  // namespace attend
