// SPDX-License-Identifier: Apache-2.0
//
// Which of Q, K and V Hopper's kernels cannot read in place. Host code, any thread.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend::cuda {

// Q, K or V, and whether it must be copied before Hopper's kernels can read it.
struct Operand {
  ConstTensorView view;
  int64_t heads, rows, columns;  // per sequence; packed: of all
  bool copied;
};
// Nothing is copied if that would not help: paged keys, 2^31 rows, or another reason of WhyNotTma.
std::array<Operand, 3> OperandsOf(const Attention& attention);

}  // namespace attend::cuda
