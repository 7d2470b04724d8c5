// SPDX-License-Identifier: Apache-2.0
//
// Parts of one attention that are attentions themselves: some of its sequences, some of its KV
// heads with the query heads that read them, some of its query rows. Large requests are cut this
// way to overlap copies with kernels. Pure arithmetic on addresses; nothing is copied, and the
// parts use the whole's memory.

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

// Whether any range of query rows is an attention of the same kind: the sequences are dense and of
// full length, and every row keeps its distance to the diagonal when the keys after the last row's
// are left out (no mask, or one that ends at the diagonal).
bool RowsCanBeSliced(const Attention& attention);

// The slice as an attention. All slices together write the whole's O and LSE, each element in its
// place. Keys that none of the slice's rows sees may be left out. INVALID_ARGUMENT names a range
// that is empty, exceeds the problem or cuts rows that cannot be cut.
Result<Attention> TakeSlice(const Attention& attention, const AttentionSlice& slice);

}  // namespace attend
