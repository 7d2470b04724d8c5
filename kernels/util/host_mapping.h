// SPDX-License-Identifier: Apache-2.0
//
// Large host memory blocks straight from mmap: committed page by page on first touch, on huge pages
// where the system has them, unmapped as a whole. Any thread.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"

namespace attend {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// At least `bytes` >= 0 bytes of zeros, aligned to kHugePageBytes. RESOURCE_EXHAUSTED if the
// address space has no room for them. Memory is not reserved: whether there is enough shows only
// when the pages are touched.
Result<void*> MapHostMemory(int64_t bytes);
// `bytes` as passed to MapHostMemory.
void UnmapHostMemory(void* data, int64_t bytes);

// Asks for huge pages in memory from elsewhere, where it has whole ones. A hint.
void AdviseHugePages(void* data, int64_t bytes);

// Physical memory of the machine.
int64_t PhysicalMemoryBytes();

}  // namespace attend
