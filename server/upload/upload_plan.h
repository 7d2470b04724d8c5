// SPDX-License-Identifier: Apache-2.0
//
// Divides a chunked request so that some of it can be computed while the rest is still arriving.
// Pure: the result depends on the problem and on the parts in which its device would compute it
// anyway (Backend::Parts). These parts do not change, so no bit of the answer depends on the
// division.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/problem.h"

namespace attend {

// Some sequences, or some KV heads of one with the query heads that read them.
struct UploadGroup {
  AttentionSlice slice;               // of the whole, all rows
  std::vector<AttentionSlice> parts;  // the device's, counted from the slice's beginning
};

// Returns groups in the order of memory that together are the whole. Each consists of neighbours
// among `parts`: enough to have `bytes_min` bytes of Q, K, V, bias and O, and with O and LSE
// contiguous in memory; but fewer where they would not be one range of sequences or of a sequence's
// heads. Empty if there would be fewer than two groups, or if O and LSE would not be contiguous: in
// the layout BLHD, if the parts are not whole sequences, and if packed.
std::vector<UploadGroup> PlanUpload(const Attention& whole, std::span<const AttentionSlice> parts,
                                    int64_t bytes_min);

}  // namespace attend
