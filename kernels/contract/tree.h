// SPDX-License-Identifier: Apache-2.0
//
// The mask of a draft whose tokens are arranged as a tree (speculative decoding), in its short
// form: T x T bits for each sequence. It is written out as a bias of bits before anything else
// reads it, always by WriteTree, so that kernels, checks and references know no trees. The draft of
// a sequence are its last queries and its last keys. Host memory only.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

inline constexpr int64_t kTreeTokensMax = 1024;  // tokens of a draft

// Bit j of row i is 1 where the draft's token i sees token j. Eight bits per byte, lowest first;
// every row begins on a byte boundary, and the unused bits of its last byte are ignored.
struct TreeView {
  const uint8_t* bits = nullptr;     // [B or 1, T, T]
  int64_t tokens = 0;                // T
  int64_t stride_b = 0;              // bytes from one sequence's tree to the next's; 0: one for all
  const int64_t* lengths = nullptr;  // [B] tokens of each sequence's draft; null: all T
};

// Bytes of one tree of `tokens` tokens.
constexpr int64_t TreeBytes(int64_t tokens) { return tokens * RowBytes(DType::kBit, tokens); }

// INVALID_ARGUMENT: `tokens`, named `field`, is outside of [1, kTreeTokensMax].
Status CheckTreeTokens(const char* field, int64_t tokens);

// INVALID_ARGUMENT: the draft of `draft` tokens of a tree of `tokens` is longer than the tree, or
// than the queries or keys of sequence b. `field` names its length; `given`: it is an array's.
Status CheckDraft(const char* field, bool given, int64_t draft, int64_t tokens, int64_t b,
                  int64_t q_len, int64_t k_len);

// The same for all sequences of an attention with its lengths or offsets. `field` names
// TreeView::lengths.
Status CheckDrafts(const char* field, const TreeView& tree, const Attention& attention);

// Describes the bias that a tree is written out as, [B, 1, Lq, Lk] or, with `shared`, [1, 1, Lq,
// Lk], without its memory. Returns its size in bytes; INVALID_ARGUMENT if it overflows.
Result<int64_t> SetTreeBias(bool shared, Attention* attention);

// Writes the tree to `out`, the memory of the bias. The attention has its lengths or offsets, and
// each draft fits.
void WriteTree(const TreeView& tree, const Attention& attention, uint8_t* out);

// The tree in which parents[i] is the parent of token i, or -1: each token sees itself and its
// ancestors. INVALID_ARGUMENT: too many tokens, or a parent that does not precede its token.
Result<std::vector<uint8_t>> TreeFromParents(std::span<const int64_t> parents);

}  // namespace attend
