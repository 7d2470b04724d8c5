// SPDX-License-Identifier: Apache-2.0
//
// What is left when the heap is empty. All that is large is counted before it is taken, so that an
// allocation that fails is a small one, in the middle of something: it gets what it wants from a
// reserve, and until the reserve is whole again new requests are refused. std::bad_alloc is thrown
// only once the reserve is gone too.
//
// Of the process, as operator new is. Any thread.

#pragma once

#include <cstdint>

namespace attend {

// Sets `bytes` aside and has operator new take them in need. Again: other bytes.
void KeepMemoryReserve(int64_t bytes);

// Whether some of the reserve has been used; it is made whole first if that is possible.
bool MemoryIsShort();

}  // namespace attend
