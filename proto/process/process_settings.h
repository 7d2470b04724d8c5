// SPDX-License-Identifier: Apache-2.0
//
// Process-wide settings that make gRPC fast, of the server and of the tools. Called once each, by
// main, before gRPC makes its first thread or block.

#pragma once

namespace attend {

// Keeps freed memory. gRPC reads into fresh 64 KiB blocks; by default glibc gives them back to the
// kernel after every message and faults them in again, which halves the rate of large transfers.
// The process then keeps its high-water mark, for each of its `arenas` (at least 1).
// M_MMAP_THRESHOLD 1 GiB, M_TRIM_THRESHOLD never, M_TOP_PAD 64 MiB, M_ARENA_MAX. The trim threshold
// alone would make large messages slower. False if the C library is not glibc, or its malloc
// refused one.
bool TuneAllocator(int arenas = 1);
// A server's: its threads' allocations are spread over these, and its memory is at most so many
// times what one would keep.
constexpr int kServerArenas = 8;

// Turns off absl::Mutex's search for deadlocks. It is for debugging, but Debian builds absl, and
// gRPC on it, with it: every lock that any of gRPC's threads takes then waits for one spin lock of
// the process, which cost a bare gRPC server on 16 cores more than a quarter of its small calls.
// Locks themselves are unchanged.
void SkipDeadlockSearch();

}  // namespace attend
