// SPDX-License-Identifier: Apache-2.0
//
// Where the tensors of an attention are in memory, from the first element of each to its last.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/contract/problem.h"
#include "server/request/request.h"

namespace attend {

struct Extent {
  const void* data = nullptr;  // null: there is no such tensor
  int64_t bytes = 0;           // 0 if it is empty
};

// Q, K, V and bias.
std::array<Extent, kTensorsMax> InputExtents(const Attention& attention);
// O and LSE.
std::array<Extent, 2> OutputExtents(const Attention& attention);

}  // namespace attend
