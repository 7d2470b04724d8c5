// SPDX-License-Identifier: Apache-2.0
//
// Measures rows of a large LSE. fp32 does not hold it precisely enough for weights that sum to 1,
// so their largest score, sum of weights and delta are computed again, with the backward pass's own
// rounding.

#pragma once

#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/cpu/flash_gradients_tile.h"

namespace attend::cpu_flash {

// Terms by TermsIndex, `known` where a row was measured. Empty if none was.
std::vector<RowTerms> MeasureRows(const Attention& attention, const Gradients& gradients,
                                  const GradientFunctions& functions, const StopFlag* stop);

}  // namespace attend::cpu_flash
