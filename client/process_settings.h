// SPDX-License-Identifier: Apache-2.0
//
// Process-wide settings that make large transfers fast. Called once, first thing in main().

#pragma once

namespace attend::client {

// Keeps glibc's malloc from returning memory to the kernel after every message, which gRPC's
// receive path would otherwise fault in again page by page: large transfers run about twice as
// fast. The process then keeps its high-water mark of memory. Sets M_MMAP_THRESHOLD,
// M_TRIM_THRESHOLD and M_TOP_PAD together (one of them alone makes things slower) and limits the
// number of arenas. Does nothing under another C library.
void TuneAllocator();

}  // namespace attend::client
