// SPDX-License-Identifier: Apache-2.0
//
// Process-wide settings that make gRPC clients, and the server's allocations, fast. main calls each
// once, before the process has other threads or gRPC has allocated anything.

#pragma once

namespace attend {

// Makes malloc keep freed memory. gRPC reads into fresh 64 KiB blocks; by default glibc returns
// them to the kernel after every message and faults them in again, which halves the rate of large
// transfers. The process then keeps its high-water mark, for each of its `arenas` (at least 1).
// Sets M_MMAP_THRESHOLD to 1 GiB, M_TRIM_THRESHOLD to never, M_TOP_PAD to 64 MiB, and M_ARENA_MAX.
// The trim threshold alone would make large messages slower. False if the C library is not glibc,
// or its malloc refused a setting.
bool TuneAllocator(int arenas = 1);
// For the server: its threads allocate from this many arenas, so it keeps at most this many times
// the memory of a single one.
constexpr int kServerArenas = 8;

// Turns off absl::Mutex's deadlock detection. It is a debugging aid, but Debian builds absl, and
// gRPC on it, with it enabled: every lock that a gRPC thread takes then takes one process-wide spin
// lock as well, which cost a bare gRPC server on 16 cores more than a quarter of its small calls.
// Mutexes behave the same otherwise.
void SkipDeadlockSearch();

}  // namespace attend
