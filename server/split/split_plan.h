// SPDX-License-Identifier: Apache-2.0
//
// How one attention is cut for several devices that are alike. Pure: the plan follows from the
// problem, its lengths and the number of devices, never from load or time.
//
// Pieces are attentions whose O is one run of memory, so that each device writes its own bytes and
// nobody gathers them. In BHLD that allows sequences, KV heads, query heads of one KV head (K and V
// then go to each device that reads them) and query rows of one head; in BLHD sequences and query
// rows; in packed LHD sequences. Rows are cut only where kernels/contract/attention_slice.h allows
// it, at multiples of kSplitRows. The cuts depend on the problem and the number of devices alone,
// so an answer's bits do too; they may differ from those of the problem run whole.
//
// Shares are about equal in FLOPs: each cut is at the coarsest boundary (sequence, KV head, query
// head, rows) within a sixteenth of a share of where it should be, else at the nearest of any.
// Where the largest share would still be more than three quarters of the whole, there is no plan.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

inline constexpr int64_t kSplitRows = 512;
// Of the whole; where the largest share would be more, a split is not worth its parts.
inline constexpr double kLargestShareMax = 0.75;

// Half-open ranges; query heads, which are whole KV heads or lie within one.
struct QuerySlice {
  int share = 0;  // whose it is, from 0; a share may have several pieces
  int64_t batch_begin = 0;
  int64_t batch_end = 0;
  int64_t heads_begin = 0;
  int64_t heads_end = 0;
  int64_t rows_begin = 0;
  int64_t rows_end = 0;

  bool operator==(const QuerySlice&) const = default;
};

// Pieces that together are exactly the whole, by share and in the order of memory. Empty if it
// cannot be split; else there are at least two shares, at most `shares`, and none is for nothing.
std::vector<QuerySlice> PlanSplit(const Attention& whole, int shares,
                                  int64_t rows_multiple = kSplitRows);

// The piece as an attention over the whole's memory. A packed piece keeps the whole's rows: its
// offsets count from the whole's first.
Result<Attention> TakeSlice(const Attention& whole, const QuerySlice& piece);

}  // namespace attend
