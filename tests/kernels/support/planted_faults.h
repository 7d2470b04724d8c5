// SPDX-License-Identifier: Apache-2.0
//
// Small faults in right answers, beside masks as people write them: the check must see each, on the
// answers of every kernel.

#pragma once

#include <functional>

#include "tests/kernels/support/problems.h"

namespace attend::test {

// Problems of `dtype` whose keys are hidden, from the left or from the right, by a bias of -1e4,
// -1e9, the smallest finite number or -inf, by ALiBi or by the scale, some with a fully masked row
// beside the others. `run` computes each, or returns false if the kernel does not support it; its
// answer must pass. Then, in rows with a visible key, 0.1 % of sum p|v| (fp32) or 8 roundoffs of it
// (16 bits) and 1e-4 in LSE must fail.
void ExpectPlantedFaultsCaught(DType dtype, const std::function<bool(OwnedAttention*)>& run);

// As above, in rows of 131,072 keys: flat ones, and ones of weights that differ. But 1e-3 in LSE: a
// plain sum of so many weights, one by one, is off by 1e-4 itself.
void ExpectLongRowFaultsCaught(DType dtype, const std::function<bool(OwnedAttention*)>& run);

// Rows fully masked by a finite bias: their answer passes, the report counts them as wide, and an
// element outside the range of V, or NaN, fails.
void ExpectWideRowsStayInRange(DType dtype, const std::function<bool(OwnedAttention*)>& run);

}  // namespace attend::test
