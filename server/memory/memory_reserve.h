// SPDX-License-Identifier: Apache-2.0
//
// A memory reserve for when the heap is exhausted. Large allocations are all admitted by a budget
// first, so one that fails is small and in the middle of some work. It is served from the reserve,
// and new requests are refused until the reserve is full again. Code that handles std::bad_alloc
// declares it with OnNoMemory and sees the exception once half of the reserve is used. The other
// half is for code that cannot handle it: libraries and accepted requests. When that is used up,
// they wait until other threads free memory.
//
// One reserve per process, as operator new is. Thread-safe.

#pragma once

#include <cstdint>
#include <new>

#include "kernels/util/status.h"

namespace attend {

// Sets `bytes` aside for operator new. May be called again with another size.
void KeepMemoryReserve(int64_t bytes);

// Whether part of the reserve is in use; tries to refill it first.
bool MemoryIsShort();
// The status for requests refused in that state.
Status OutOfMemory();

// During its lifetime, sets what operator new does on this thread when no memory is left.
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

// Calls `work` with OnNoMemory::kThrow. False if it ran out of memory.
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

// The status of `work`, called likewise; OutOfMemory() if it ran out of memory.
template <class Work>
Status OrOutOfMemory(const Work& work) {
  Status status;
  if (!TryAllocating([&] { status = work(); })) return OutOfMemory();
  return status;
}

}  // namespace attend
