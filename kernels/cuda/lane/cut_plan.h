// SPDX-License-Identifier: Apache-2.0
//
// Decides whether an attention is computed in parts, and in which, so that one part is copied while
// another is computed, and no launch is long. Pure arithmetic.
//
// The decision is a function of the problem, its kernel and constants alone. Load, other items and
// the device's size do not change it, and so do not change a bit of an answer. A part may get
// another compiled variant than the whole would (the variant depends on length and number of
// tiles), and then other bits than the whole in one launch; but the bits are the same every time.

#pragma once

#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/lane/lane_tuning.h"

namespace attend::cuda {

// Query rows are cut at multiples of this, a multiple of every compiled tile's rows, so that a tile
// has the same rows as in the whole.
inline constexpr int64_t kCutRows = 768;
inline constexpr int kCutPartsMost = 1024;

// The parts of `attention` (host memory: lengths are read), in execution order; together they are
// the whole. Empty if it is not cut. Sequences are cut first, then KV heads with their query heads,
// then query rows if the mask allows it. Parts of the same sequences and heads are consecutive,
// with rows ascending. A part may exceed launch_seconds_max if rows cannot be cut, or if three
// waves of its kernel's tiles take longer.
std::vector<AttentionSlice> PlanParts(const Attention& attention, KernelId kernel,
                                      const CutBounds& bounds);

// The same parts with neighbours joined, for an attention none of whose tensors is copied: small
// parts would only leave multiprocessors idle. Joins parts only if the result is not too long, at
// least parts_min remain, and no bit changes: the compiled variants stay the parts' own, and rows
// are not joined if the mask is aligned to the part's last row.
std::vector<AttentionSlice> JoinParts(const Attention& attention, KernelId kernel,
                                      const CutBounds& bounds,
                                      const std::vector<AttentionSlice>& parts);

}  // namespace attend::cuda
