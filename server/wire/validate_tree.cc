// SPDX-License-Identifier: Apache-2.0

#include "server/wire/validate_tree.h"

#include <string>

#include "server/wire/validate_lengths.h"

namespace attend {
namespace {

// The lengths of one side of the sequences, one after another: given, cumulative, or all `longest`.
class Lengths {
 public:
  Lengths(const WireArrays& arrays, ArrayField dense, ArrayField cumulative, const Problem& p,
          int64_t longest)
      : packed_(p.packed),
        given_(p.packed || arrays.size(dense) > 0),
        longest_(longest),
        entries_(arrays.Read<int64_t>(p.packed ? cumulative : dense)) {
    if (packed_) (void)entries_.Next(last_);
  }

  int64_t Next() {
    int64_t length = longest_;
    if (given_) (void)entries_.Next(length);
    if (!packed_) return length;
    const int64_t begin = last_;
    last_ = length;
    return length - begin;
  }

 private:
  const bool packed_;
  const bool given_;
  const int64_t longest_;
  int64_t last_ = 0;
  WireArrays::Cursor<int64_t> entries_;
};

Status CheckBits(const v1::AttendRequest& request, int64_t bytes, const Problem& p,
                 TreeView& tree) {
  ATTEND_RETURN_IF_ERROR(CheckTreeTokens("tree_tokens", request.tree_tokens()));
  tree.tokens = request.tree_tokens();
  const int64_t one = TreeBytes(tree.tokens);
  const int64_t all = one * p.batch;  // at most 2^17 * kBatchMax
  if (bytes != one && bytes != all) {
    return InvalidArgument("tree has " + std::to_string(bytes) + " bytes, must have " +
                           std::to_string(one) + ", those of one tree of " +
                           std::to_string(tree.tokens) + " tokens, or " + std::to_string(all) +
                           ", those of B = " + std::to_string(p.batch));
  }
  tree.stride_b = bytes == one ? 0 : one;
  return Status();
}

// Checks each sequence's draft against its own queries and keys.
Status CheckFits(const WireArrays& arrays, const CacheHold* cache, const Problem& p,
                 int64_t tokens) {
  const bool given = arrays.size(ArrayField::kTreeLengths) > 0;
  auto drafts = arrays.Read<int64_t>(ArrayField::kTreeLengths);
  Lengths q(arrays, ArrayField::kQLengths, ArrayField::kCuQ, p, p.len_q);
  Lengths kv(arrays, ArrayField::kKvLengths, ArrayField::kCuKv, p, p.len_k);
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t draft = tokens;
    if (given) (void)drafts.Next(draft);
    const int64_t queries = q.Next();
    const int64_t sent_keys = kv.Next();
    const int64_t keys = cache == nullptr ? sent_keys : cache->sequences()[b].length;
    ATTEND_RETURN_IF_ERROR(
        CheckDraft(given ? "tree_lengths" : "tree_tokens", given, draft, tokens, b, queries, keys));
  }
  return Status();
}

}  // namespace

Status ValidateTree(const v1::AttendRequest& request, const WireArrays& arrays,
                    const CacheHold* cache, Validated& out) {
  const int64_t bytes = arrays.size(ArrayField::kTree);
  const int64_t lengths = arrays.size(ArrayField::kTreeLengths);
  Attention& a = out.attention;
  const Problem& p = a.problem;
  if (bytes == 0) {
    if (lengths > 0) return WrongCount("tree_lengths", lengths, "none without a tree");
    if (request.tree_tokens() == 0) return Status();
    return InvalidArgument("tree_tokens is " + std::to_string(request.tree_tokens()) +
                           ", must be 0 without a tree");
  }
  if (p.has_bias) {
    return InvalidArgument("tree has " + std::to_string(bytes) +
                           " bytes, must be empty with a bias, which it is a short form of");
  }
  if (request.has_backward()) {
    return InvalidArgument("tree has " + std::to_string(bytes) +
                           " bytes, must be empty with backward");
  }
  if (p.keys_after > 0) {
    return InvalidArgument("mask.keys_after is " + std::to_string(p.keys_after) +
                           ", must be 0 with a tree, whose tokens are the last keys");
  }
  ATTEND_RETURN_IF_ERROR(CheckBits(request, bytes, p, out.tree));
  if (lengths != 0 && lengths != p.batch) {
    return WrongCount("tree_lengths", lengths, "B = " + std::to_string(p.batch) + ", or 0");
  }
  ATTEND_RETURN_IF_ERROR(CheckFits(arrays, cache, p, out.tree.tokens));
  const bool alike = out.tree.stride_b == 0 && lengths == 0 && !p.packed && cache == nullptr &&
                     arrays.size(ArrayField::kQLengths) == 0 &&
                     arrays.size(ArrayField::kKvLengths) == 0;
  const Result<int64_t> written = SetTreeBias(alike, &a);
  if (!written.ok()) return written.status();
  out.tree_bytes = *written;
  return Status();
}

}  // namespace attend
