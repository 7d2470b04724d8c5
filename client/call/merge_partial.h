// SPDX-License-Identifier: Apache-2.0
//
// One attention in parts: its keys are cut anywhere, each part is a call of its own
// (MaskOption::key_offset and keys_after say where it is), and the answers are merged here. The
// merged answer is that of the uncut call, up to rounding in float32. Pure.
//
// Of the parts' calls: each with return_lse and o_float32, the same q, mask, scale, softcap and
// slopes, its own rows of k, v and bias; a sink in one of them only.
//
// For gradients: each part's backward pass is given the merged O and LSE, o_float32, and the same
// d_o (and d_lse). Then the weights are those of the whole, and a part's dK, dV and dBias are
// final.

#pragma once

#include <vector>

#include "client/call/attention_call.h"

namespace attend::client {

// O, float32, and LSE of the whole. `layout` is the calls'. INVALID_ARGUMENT names what parts lack
// or where they do not fit together. An answer of no visible keys changes nothing.
Result<AttentionResult> MergePartial(const std::vector<AttentionResult>& parts, v1::Layout layout);

// The answer of a part whose call left out rows of q: it has those from first_row on.
struct PartialRows {
  const AttentionResult* answer = nullptr;
  int64_t first_row = 0;
};
// The same where parts have rows of q of their own, of `rows` in all; a row that none has sees no
// key. `sinks`, [Hq] or empty, are the whole's, and then in no part. Not for LAYOUT_LHD.
Result<AttentionResult> MergePartial(const std::vector<PartialRows>& parts, int64_t rows,
                                     const std::vector<float>& sinks, v1::Layout layout);

// `parts` in the order of their keys. dQ and dSinks, where parts have them, are their sums, in
// float32; dK, dV and dBias lie one after the other along the keys. Not for LAYOUT_LHD, whose
// sequences each have keys of every part.
Result<GradientTensors> MergePartialGradients(const std::vector<AttentionResult>& parts,
                                              v1::Layout layout);

}  // namespace attend::client
