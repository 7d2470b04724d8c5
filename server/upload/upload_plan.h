// SPDX-License-Identifier: Apache-2.0
//
// How a chunked request is divided so that some of it can be computed while the rest is on its way.
// Pure: it follows from the problem and from the parts that its device would compute it in anyway
// (Backend::Parts), which stay what they are; so no bit of the answer depends on it.

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

// Groups in the order of memory that together are the whole, each of neighbours among `parts`: as
// many as have `bytes_min` bytes of Q, K, V, bias and O, and whose O and LSE are a run of memory
// each, but fewer where they would not be one range of sequences or of a sequence's heads. None if
// there would be fewer than two, or no such runs: in the layout BLHD, where the parts are not whole
// sequences, and packed.
std::vector<UploadGroup> PlanUpload(const Attention& whole, std::span<const AttentionSlice> parts,
                                    int64_t bytes_min);

}  // namespace attend
