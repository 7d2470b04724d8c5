// SPDX-License-Identifier: Apache-2.0
//
// How the C library's allocator treats the memory of this process. gRPC reads into fresh 64 KiB
// blocks; by default glibc gives them back to the kernel after every message and faults them in
// again, which halves the rate of large transfers. Called once, by main, before gRPC starts.

#pragma once

namespace attend {

// Keeps freed memory: M_MMAP_THRESHOLD 1 GiB, M_TRIM_THRESHOLD at its maximum, M_TOP_PAD 64 MiB,
// M_ARENA_MAX 1. All four or none: the trim threshold alone makes large messages slower. False if
// the allocator refused one, or is not glibc's.
bool TuneAllocator();

}  // namespace attend
