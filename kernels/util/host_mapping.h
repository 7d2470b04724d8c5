// SPDX-License-Identifier: Apache-2.0
//
// Large pieces of host memory straight from the system: page by page when first touched, on huge
// pages where it has them, given back whole. Any thread.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"

namespace attend {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// At least `bytes` >= 0 bytes of zeros, aligned to kHugePageBytes. RESOURCE_EXHAUSTED if there are
// not that many addresses. Only touching them shows whether there is memory for them.
Result<void*> MapHostMemory(int64_t bytes);
// `bytes` as they were asked for.
void UnmapHostMemory(void* data, int64_t bytes);

// The machine's memory.
int64_t PhysicalMemoryBytes();

}  // namespace attend
