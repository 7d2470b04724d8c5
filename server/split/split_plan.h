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
// head, rows) within a sixteenth of a shard of where it should be, else at the nearest of any.
// Where the largest shard would still be more than three quarters of the whole, there is no plan.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"
#include "server/request/query_slice.h"
#include "server/util/thresholds.h"

namespace attend {

// Pieces that together are exactly the whole, by shard and in the order of memory. Empty if it
// cannot be split; else there are at least two shards, at most `shards`, and none is for nothing.
std::vector<QuerySlice> PlanSplit(const Attention& whole, int shards,
                                  int64_t rows_multiple = thresholds::kSplitRows);

// The piece as an attention over the whole's memory. A packed piece keeps the whole's rows: its
// offsets count from the whole's first.
Result<Attention> TakeQuerySlice(const Attention& whole, const QuerySlice& piece);

}  // namespace attend
