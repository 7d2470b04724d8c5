// SPDX-License-Identifier: Apache-2.0
//
// Trees of drafts, written out in the caller's memory.

#include <string>

#include "kernels/c/attend_c.h"
#include "kernels/c/attend_c_params.h"
#include "kernels/c/attend_c_status.h"
#include "kernels/contract/limits.h"
#include "kernels/contract/tree.h"

namespace attend::c {
namespace {

// One sequence's length, given by cumulative offsets, by lengths, or the longest. Offsets are
// bounded before they are subtracted.
Status CheckLength(const char* what, int64_t b, const int64_t* offsets, const int64_t* lengths,
                   int64_t longest) {
  const std::string name = std::string(what) + " of sequence " + std::to_string(b);
  if (offsets == nullptr) {
    return lengths == nullptr ? Status() : CheckRange(name.c_str(), lengths[b], 0, longest);
  }
  ATTEND_RETURN_IF_ERROR(CheckRange((name + " begin").c_str(), offsets[b], 0, INT64_MAX));
  ATTEND_RETURN_IF_ERROR(CheckRange((name + " end").c_str(), offsets[b + 1], 0, INT64_MAX));
  return CheckRange(name.c_str(), offsets[b + 1] - offsets[b], 0, longest);
}

// The sizes and lengths of `params`, and nothing else of them.
Status ReadSizes(const attend_params& params, Attention* a) {
  Problem& p = a->problem;
  p.packed = params.packed != 0;
  p.batch = params.batch;
  p.len_q = params.len_q;
  p.len_k = params.len_k;
  ATTEND_RETURN_IF_ERROR(CheckRange("batch", p.batch, 0, kBatchMax));
  ATTEND_RETURN_IF_ERROR(CheckRange("len_q", p.len_q, 0, kLengthMax));
  ATTEND_RETURN_IF_ERROR(CheckRange("len_k", p.len_k, 0, kLengthMax));
  a->q_lengths = params.q_lengths;
  a->kv_lengths = params.kv_lengths;
  a->q_offsets = params.q_offsets;
  a->kv_offsets = params.kv_offsets;
  if (p.packed && (a->q_offsets == nullptr || a->kv_offsets == nullptr)) {
    return InvalidArgument("packed needs q_offsets and kv_offsets, one is NULL");
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    ATTEND_RETURN_IF_ERROR(
        CheckLength("queries", b, p.packed ? a->q_offsets : nullptr, a->q_lengths, p.len_q));
    ATTEND_RETURN_IF_ERROR(
        CheckLength("keys", b, p.packed ? a->kv_offsets : nullptr, a->kv_lengths, p.len_k));
  }
  return Status();
}

Status Write(const attend_tree* tree, const attend_params* params, void* bias, int64_t bytes) {
  if (tree == nullptr || params == nullptr || tree->bits == nullptr) {
    return InvalidArgument("tree, tree.bits or params is NULL");
  }
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("attend_tree", tree->struct_bytes, sizeof(*tree)));
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("attend_params", params->struct_bytes, sizeof(*params)));
  ATTEND_RETURN_IF_ERROR(CheckTreeTokens("tree.tokens", tree->tokens));
  const int64_t one = TreeBytes(tree->tokens);
  if (tree->stride_b != 0 && tree->stride_b < one) {
    return InvalidArgument("tree.stride_b is " + std::to_string(tree->stride_b) +
                           ", must be 0 or at least a tree's " + std::to_string(one) + " bytes");
  }
  Attention a;
  ATTEND_RETURN_IF_ERROR(ReadSizes(*params, &a));
  const TreeView view{static_cast<const uint8_t*>(tree->bits), tree->tokens, tree->stride_b,
                      tree->lengths};
  ATTEND_RETURN_IF_ERROR(CheckDrafts("tree.lengths", view, a));
  const Result<int64_t> needed = SetTreeBias(/*shared=*/false, &a);
  if (!needed.ok()) return needed.status();
  if (bytes != *needed || (bias == nullptr && bytes > 0)) {
    return InvalidArgument("bytes is " + std::to_string(bytes) +
                           (bias == nullptr ? " at NULL" : "") + ", must be " +
                           std::to_string(*needed) + ", those of a bias [B, 1, Lq, Lk] of bits");
  }
  if (bytes > 0) WriteTree(view, a, static_cast<uint8_t*>(bias));
  return Status();
}

}  // namespace
}  // namespace attend::c

int32_t attend_write_tree(const attend_tree* tree, const attend_params* params, void* bias,
                          int64_t bytes) {
  return attend::Run([&] { return attend::c::Write(tree, params, bias, bytes); });
}
