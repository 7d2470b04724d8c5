// SPDX-License-Identifier: Apache-2.0
//
// What is left when the heap is empty. All that is large is counted before it is taken, so that an
// allocation that fails is a small one, in the middle of something: it gets what it wants from a
// reserve, and until the reserve is whole again new requests are refused. Where somebody deals with
// std::bad_alloc, which OnNoMemory says, it is thrown once half of the reserve is gone: the other
// half is for what could not deal with it, gRPC and requests that were accepted. They use that up
// too, and then wait for memory that others give back.
//
// Of the process, as operator new is. Any thread.

#pragma once

#include <cstdint>

namespace attend {

// Sets `bytes` aside and has operator new take them in need. Again: other bytes.
void KeepMemoryReserve(int64_t bytes);

// Whether some of the reserve has been used; it is made whole first if that is possible.
bool MemoryIsShort();

// What operator new does on this thread while this lives, if nothing is left.
class OnNoMemory {
 public:
  enum Then { kWait, kThrow };  // kWait: for a second at most, then it throws too
  explicit OnNoMemory(Then then);
  ~OnNoMemory();
  OnNoMemory(const OnNoMemory&) = delete;
  OnNoMemory& operator=(const OnNoMemory&) = delete;

 private:
  const Then before_;
};

}  // namespace attend
