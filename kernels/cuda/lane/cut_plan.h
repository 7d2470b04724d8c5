// SPDX-License-Identifier: Apache-2.0
//
// Whether an attention is computed in parts, and in which, so that one part is copied while another
// is computed, and no launch is long. Pure arithmetic.
//
// The decision is a function of the problem, its kernel and constants alone: neither load nor
// neighbours nor the device's size change it, and so no bit of an answer. A part may get another
// compiled variant than the whole would (variants go by length and count of tiles), and then other
// bits than the whole in one launch; they are the same at every asking.

#pragma once

#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/lane/lane_tuning.h"

namespace attend::cuda {

// Query rows are cut at multiples of this: of the rows of every compiled tile, so that a tile holds
// the same rows as in the whole.
inline constexpr int64_t kCutRows = 768;
inline constexpr int kCutPartsMost = 1024;

// The parts of `attention` (host memory: lengths are read), in the order to compute them, together
// the whole; none if it is not cut. Sequences are cut first, then KV heads with the query heads
// that read them, then query rows, where the mask allows it: parts of equal sequences and heads
// follow each other, rows ascending. A part may take more than launch_seconds_max where the rows
// cannot be cut, and where three waves of its kernel's tiles do.
std::vector<AttentionSlice> PlanParts(const Attention& attention, KernelId kernel,
                                      const CutBounds& bounds);

// The same parts, neighbours as one, for an attention of which no tensor is copied: small parts
// would only leave multiprocessors idle. As long as a part is not too long, there are parts_min,
// and no bit changes: the compiled variants are the parts' own, and rows are not joined where a
// mask counts them from the part's last.
std::vector<AttentionSlice> JoinParts(const Attention& attention, KernelId kernel,
                                      const CutBounds& bounds,
                                      const std::vector<AttentionSlice>& parts);

}  // namespace attend::cuda
