// SPDX-License-Identifier: Apache-2.0
//
// Standard attention in the problem's own precision, one row at a time: the accuracy of a plain,
// careful implementation, which check_rows measures kernels against. Host memory, calling thread.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// As ReferenceRow, but scores are accumulated in fp32 key by key, weights exp(score - max) are
// rounded to the dtype, if `weights_rounded`, then divided by their sum (the sink included), and O
// is accumulated in fp32 and rounded to its own dtype. The sum has eight accumulators, as kernels
// have at least: a single one would drift in long rows and hide the loss of a key. Weights are
// rounded before the division, as kernels do it: divided, those of a long row would all be too
// small for fp16. Dropout comes last. Returns early once `stop` is set.
void PlainRow(const Attention& attention, int64_t b, int64_t h, int64_t i, bool weights_rounded,
              float* o, float* lse, const StopFlag* stop = nullptr);

}  // namespace attend
