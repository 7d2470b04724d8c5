// SPDX-License-Identifier: Apache-2.0
//
// Slices of one attention that are attentions themselves: a range of its sequences, of its KV heads
// with their query heads, or of its query rows. Large requests are cut this way to overlap copies
// with kernels. Pure address arithmetic: nothing is copied, slices alias the whole's memory.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

// Half-open ranges.
struct AttentionSlice {
  int64_t batch_begin = 0;
  int64_t batch_end = 0;
  int64_t heads_begin = 0;  // KV heads
  int64_t heads_end = 0;
  int64_t rows_begin = 0;  // query rows of every sequence
  int64_t rows_end = 0;
};

// Whether any range of query rows is an attention of the same kind: sequences are dense and of full
// length, and dropping the keys after the last row's diagonal changes no row (no mask, or one that
// ends at the diagonal).
bool RowsCanBeSliced(const Attention& attention);

// The slice as an attention. Together, the slices of a partition write every element of the whole's
// O and LSE, in place. Keys that no row of the slice sees may be left out. INVALID_ARGUMENT names a
// range that is empty, out of bounds, or cuts rows that cannot be cut.
Result<Attention> TakeSlice(const Attention& attention, const AttentionSlice& slice);

}  // namespace attend
