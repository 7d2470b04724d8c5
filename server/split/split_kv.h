// SPDX-License-Identifier: Apache-2.0
//
// One attention cut by its keys, for few rows over very many keys: where sequences, heads and rows
// do not suffice (split_plan.h), or cutting those would send K and V to several devices. Each part
// computes all rows over some of the keys into O and LSE of its own; by their LSE they are then
// merged (the algebra of kernels/contract/softmax_state.h) into the whole's. Pure, as split_plan.h
// is.
//
// Parts' O are in the problem's dtype, so an element is rounded twice on its way, which
// kernels/reference/check_rows.h grants whoever says so. K and V are divided; a bias of several
// rows, whose keys lie inside, goes to every device nearly whole.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/problem.h"
#include "server/split/split_plan.h"

namespace attend {

// How often an element of O that was merged from parts was rounded to its dtype.
inline constexpr int kMergedRoundings = 2;

// Ranges of keys about equal in length, one a share, each beginning at a multiple of
// `keys_multiple`. Fewer than `shares` where merging so many would cost more than a small part of
// reading the keys, or a host thread more than some tens of milliseconds. Empty if it cannot be cut
// so: packed, with true lengths, ALiBi, a mask that hides keys on the left or from the first row of
// all but the last range.
std::vector<SplitPiece> PlanKeySplit(const Attention& whole, int shares,
                                     int64_t keys_multiple = kSplitRows);

// PlanSplit's plan; PlanKeySplit's where there is none, or where it spares the busiest device much
// more of K and V than merging costs.
std::vector<SplitPiece> PlanSplitOrKeys(const Attention& whole, int shares,
                                        int64_t multiple = kSplitRows);

// The attention over keys [begin, end), as PlanKeySplit cuts them, which returns LSE. A sink counts
// with the first key. O and LSE are the whole's: whoever runs it gives it its own.
Attention TakeKeys(const Attention& whole, int64_t begin, int64_t end);

// Merges parts over disjoint keys, which are all of the whole's, into its O (and LSE, if it returns
// it). Rows that no part saw a key of become 0 and -inf.
void MergeKeys(std::span<const Attention> parts, const Attention& whole);

}  // namespace attend
