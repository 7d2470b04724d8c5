// SPDX-License-Identifier: Apache-2.0
//
// Which of Q, K and V Hopper's kernels cannot read where they are. Host code, any thread.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend::cuda {

// Q, K or V, and whether it must be copied before Hopper's kernels can read it.
struct Operand {
  ConstTensorView view;
  int64_t heads, rows, columns;  // of batch sequences, or one if packed
  bool copied;
};
// None is copied if that would not help: rows in pages, 2^31 rows, or another fault of WhyNotTma.
std::array<Operand, 3> OperandsOf(const Attention& attention);

}  // namespace attend::cuda
