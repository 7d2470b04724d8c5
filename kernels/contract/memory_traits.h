// SPDX-License-Identifier: Apache-2.0
//
// Where Q, K, V and a bias lie, as far as kernels are chosen by it.

#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

struct MemoryTraits {
  // Why Hopper's copies cannot address Q, K, V or a bias of 16 bits; "" if they can. One clause,
  // static storage.
  std::string_view not_tma;
  // Bytes of a copy of Q, K and V, as far as they are why, that can be addressed: a launch makes it
  // in its workspace. 0: no copy helps.
  int64_t repack_bytes = 0;
};

// Bytes of a copy of a tensor of 16-bit elements whose rows begin on 16-byte boundaries, a multiple
// of 256 above 0. INVALID_ARGUMENT: overflow, or a sequence beyond what kernels can step over.
Result<int64_t> RepackedBytes(int64_t batch, int64_t heads, int64_t rows, int64_t columns);

// The traits of contiguous 16-bit tensors that begin on 16-byte boundaries, as the server lays them
// out.
MemoryTraits ContiguousTraits(const Problem& problem);

}  // namespace attend
