// SPDX-License-Identifier: Apache-2.0
//
// A reserve for when the heap is exhausted. Everything large is counted before it is allocated, so
// an allocation that fails is a small one, in the middle of something. It is served from the
// reserve, and new requests are refused until the reserve is whole again. Code that handles
// std::bad_alloc says so with OnNoMemory; there it is thrown once half of the reserve is used. The
// other half is for code that cannot handle it: gRPC and accepted requests. When that is used up
// too, they wait until other threads free memory.
//
// One reserve for the process, as for operator new. Thread-safe.

#pragma once

#include <cstdint>
#include <new>

#include "kernels/util/status.h"

namespace attend {

// Sets `bytes` aside for operator new to use when the heap is exhausted. May be called again, to
// change `bytes`.
void KeepMemoryReserve(int64_t bytes);

// Whether some of the reserve is used; it is first refilled if possible.
bool MemoryIsShort();
// What is then said to requests.
Status OutOfMemory();

// While this lives, decides what operator new does on this thread if nothing is left.
class OnNoMemory {
 public:
  enum Then { kWait, kThrow };  // kWait: waits for at most a second, then throws too
  explicit OnNoMemory(Then then);
  ~OnNoMemory();
  OnNoMemory(const OnNoMemory&) = delete;
  OnNoMemory& operator=(const OnNoMemory&) = delete;

 private:
  const Then before_;
};

// Calls `work` with OnNoMemory::kThrow. Whether there was memory for it.
template <class Work>
bool TryAllocating(const Work& work) {
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    work();
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Returns what `work`, so called, returns; without memory for it OutOfMemory().
template <class Work>
Status OrOutOfMemory(const Work& work) {
  Status status;
  if (!TryAllocating([&] { status = work(); })) return OutOfMemory();
  return status;
}

}  // namespace attend
