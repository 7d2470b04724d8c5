// SPDX-License-Identifier: Apache-2.0
//
// Attention over parts of the keys. The keys are cut anywhere, each part is a call of its own
// (MaskOption::key_offset and keys_after give its position), and the answers are merged here. The
// result is that of the uncut call, up to rounding in float32. Pure.
//
// Every part's call must have return_lse and o_float32, the same q and options, and its own rows of
// k, v and bias; sinks go into one part only.
//
// Gradients: each part's backward pass gets the merged O and LSE, o_float32, and the same d_o (and
// d_lse). Its weights are then those of the whole, so each part's dK, dV and dBias are final.

#pragma once

#include <vector>

#include "client/call/attention_call.h"

namespace attend::client {

// O, float32, and LSE of the whole. `layout` is that of the calls. INVALID_ARGUMENT: a part lacks
// LSE or float32 O, or the shapes differ. A part that sees no key changes nothing.
Result<AttentionResult> MergePartial(const std::vector<AttentionResult>& parts, v1::Layout layout);

// The answer of a part whose call left out q rows: it has the rows from first_row on.
struct PartialRows {
  const AttentionResult* answer = nullptr;
  int64_t first_row = 0;
};
// The same for parts with different q rows, out of `rows`; a row in no part sees no key. `sinks`,
// [Hq] or empty, are applied once here, so no part may have them. Not for LAYOUT_LHD.
Result<AttentionResult> MergePartial(const std::vector<PartialRows>& parts, int64_t rows,
                                     const std::vector<float>& sinks, v1::Layout layout);

// `parts` in key order. dQ and dSinks are summed, in float32; dK, dV and dBias are concatenated
// along the keys. Not for LAYOUT_LHD, where each sequence has keys in every part.
Result<GradientTensors> MergePartialGradients(const std::vector<AttentionResult>& parts,
                                              v1::Layout layout);

}  // namespace attend::client
