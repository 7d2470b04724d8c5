// SPDX-License-Identifier: Apache-2.0
//
// How one attention is cut for several equal devices. Pure: the plan follows from the problem, its
// lengths and the number of devices, never from load or time.
//
// A slice is an attention whose O is contiguous in memory, so that each device writes its own bytes
// and no gather is needed. BHLD can be cut by sequences, KV heads, query heads of one KV head (K
// and V then go to each device that reads them) and query rows of one head; BLHD by sequences and
// query rows; packed LHD by sequences. Rows are cut only where kernels/contract/attention_slice.h
// allows it, at multiples of kSplitRows. The cuts depend only on the problem and the number of
// devices, and so do the answer's bits; they may differ from those of the problem run whole.
//
// A shard is what one device computes: one slice or several. Shards are about equal in FLOPs: each
// cut is at the coarsest boundary (sequence, KV head, query head, rows) within a sixteenth of a
// shard of its ideal place, else at the nearest boundary. If the largest shard would still be more
// than three quarters of the whole, there is no plan.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"
#include "server/request/query_slice.h"
#include "server/util/thresholds.h"

namespace attend {

// Returns slices that together are exactly the whole, by shard and in the order of memory. Empty if
// it cannot be split; otherwise there are at least two shards, at most `shards`, and none is empty.
std::vector<QuerySlice> PlanSplit(const Attention& whole, int shards,
                                  int64_t rows_multiple = thresholds::kSplitRows);

// The slice as an attention over the whole's memory. A packed slice keeps the whole's rows: its
// offsets count from the whole's first row.
Result<Attention> TakeQuerySlice(const Attention& whole, const QuerySlice& slice);

}  // namespace attend
