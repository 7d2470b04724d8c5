// SPDX-License-Identifier: Apache-2.0
//
// Parts of one attention that are attentions themselves: some of its sequences, some of its KV
// heads with the query heads that read them, some of its query rows. Large requests are cut so for
// several devices, or so that copies run beside kernels. Pure arithmetic on addresses; nothing is
// copied, and the memory stays the whole's.

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

// All of it.
AttentionSlice WholeSlice(const Problem& problem);

// Whether any range of query rows is an attention of the same kind: the sequences are dense and of
// full length, and every row keeps its distance to the diagonal when the keys behind the last row's
// are left out (no mask, or one that ends at the diagonal).
bool RowsCanBeSliced(const Attention& attention);

// The slice as an attention: O and LSE of all slices are the whole's, each element in its place.
// Some of its keys may be left out, if none of its rows sees them. INVALID_ARGUMENT names a range
// that is empty, leaves the problem or cuts rows that cannot be.
Result<Attention> TakeSlice(const Attention& attention, const AttentionSlice& slice);

}  // namespace attend
