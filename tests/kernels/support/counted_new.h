// SPDX-License-Identifier: Apache-2.0
//
// operator new of the whole test binary, counted and made to fail for one thread: how much code
// allocates at most, and how it behaves when the heap is exhausted. Linking counted_new.cc is
// enough.

#pragma once

#include <cstdint>

namespace attend::test {

// Heap bytes that the calling thread has allocated and not freed since construction, and their
// maximum. Memory that another thread frees stays counted.
class HeapWatch {
 public:
  HeapWatch();
  int64_t held_bytes() const;
  int64_t peak_bytes() const;
};

// While it lives, the N-th allocation (1 = the next), counted over all threads, fails: it throws
// std::bad_alloc or, if there is a new-handler, calls that. `only` is asked in each allocation of
// all threads but the fault's own, and only those for which it returns true count. The N-th fails
// for a while, even if a new-handler frees memory: permanently, unless the handler waits.
class HeapFault {
 public:
  explicit HeapFault(int64_t nth, bool (*only)() = nullptr);
  ~HeapFault();
  HeapFault(const HeapFault&) = delete;
  HeapFault& operator=(const HeapFault&) = delete;
  // Whether the N-th one has been reached.
  bool reached() const;
};

}  // namespace attend::test
