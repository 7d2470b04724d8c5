// SPDX-License-Identifier: Apache-2.0
//
// The properties of the memory of Q, K, V and a bias that decide which kernels can run.

#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

struct MemoryTraits {
  // Why Hopper's copy engine (TMA) cannot address Q, K, V or a 16-bit bias; "" if it can. One
  // clause, static storage.
  std::string_view not_tma;
  // Bytes for aligned copies of those of Q, K and V that TMA cannot address; a launch makes the
  // copies in its workspace. 0: copying does not help.
  int64_t repack_bytes = 0;
};

// Bytes for a copy of a 16-bit tensor with rows on 16-byte boundaries: a multiple of 256, above 0.
// INVALID_ARGUMENT: overflow, or a sequence larger than kernels can address.
Result<int64_t> RepackedBytes(int64_t batch, int64_t heads, int64_t rows, int64_t columns);

// The traits of contiguous 16-bit tensors on 16-byte boundaries, which is the server's layout.
MemoryTraits ContiguousTraits(const Problem& problem);

}  // namespace attend
