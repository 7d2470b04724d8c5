// SPDX-License-Identifier: Apache-2.0

#include "kernels/contract/tree.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace attend {
namespace {

// Clears the bits of `row` from position `at` on where the first `tokens` bits of `seen` are 0.
void ClearHidden(const uint8_t* seen, int64_t tokens, int64_t at, uint8_t* row) {
  for (int64_t j = 0; j < tokens; j += 8) {
    const int64_t left = std::min<int64_t>(tokens - j, 8);
    const uint32_t hidden = ~uint32_t{seen[j / 8]} & ((uint32_t{1} << left) - 1);
    const uint32_t placed = hidden << (static_cast<uint32_t>(at + j) & 7u);
    row[(at + j) / 8] &= static_cast<uint8_t>(~placed);
    // Nothing is hidden beyond the sequence's last key, so the next byte is the row's.
    if (placed > 0xff) row[(at + j) / 8 + 1] &= static_cast<uint8_t>(~(placed >> 8));
  }
}

}  // namespace

Status CheckTreeTokens(const char* field, int64_t tokens) {
  if (tokens >= 1 && tokens <= kTreeTokensMax) return Status();
  return InvalidArgument(std::string(field) + " is " + std::to_string(tokens) +
                         ", must be in [1, " + std::to_string(kTreeTokensMax) + "] with a tree");
}

Status CheckDraft(const char* field, bool given, int64_t draft, int64_t tokens, int64_t b,
                  int64_t q_len, int64_t k_len) {
  const int64_t most = std::min({tokens, q_len, k_len});
  if (draft >= 0 && draft <= most) return Status();
  std::string text(field);
  if (given) text += "[" + std::to_string(b) + "]";
  text += " is " + std::to_string(draft) + ", must be in [0, " + std::to_string(most) + "]: ";
  if (draft < 0 || draft > tokens) {
    return InvalidArgument(text + "the tree has " + std::to_string(tokens) + " tokens");
  }
  return InvalidArgument(text + "sequence " + std::to_string(b) + " has " + std::to_string(q_len) +
                         " queries and " + std::to_string(k_len) + " keys");
}

Status CheckDrafts(const char* field, const TreeView& tree, const Attention& a) {
  const bool given = tree.lengths != nullptr;
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    ATTEND_RETURN_IF_ERROR(CheckDraft(given ? field : "the tree's number of tokens", given,
                                      given ? tree.lengths[b] : tree.tokens, tree.tokens, b,
                                      s.q_len, s.k_len));
  }
  return Status();
}

Result<int64_t> SetTreeBias(bool shared, Attention* a) {
  const Problem& p = a->problem;
  const int64_t row_bytes = RowBytes(DType::kBit, p.len_k);
  // Strides count bits, so their number must not overflow either.
  const Result<int64_t> bits =
      CheckedProduct("the tree's bits, written out for all queries and keys,", shared ? 1 : p.batch,
                     p.len_q, row_bytes, 8);
  if (!bits.ok()) return bits;
  SetBias(DType::kBit, &a->problem);
  a->bias = {nullptr, DType::kBit, shared ? 0 : p.len_q * row_bytes * 8, 0, row_bytes * 8};
  return *bits / 8;
}

void WriteTree(const TreeView& tree, const Attention& a, uint8_t* out) {
  const Problem& p = a.problem;
  const int64_t sequences = a.bias.stride_b == 0 ? std::min<int64_t>(p.batch, 1) : p.batch;
  const int64_t row_bytes = a.bias.stride_q / 8;
  std::memset(out, 0xff, static_cast<size_t>(sequences * p.len_q * row_bytes));
  for (int64_t b = 0; b < sequences; ++b) {
    const Sequence s = SequenceOf(a, b);
    const int64_t tokens = tree.lengths == nullptr ? tree.tokens : tree.lengths[b];
    const uint8_t* seen = tree.bits + b * tree.stride_b;
    uint8_t* row = out + (b * p.len_q + s.q_len - tokens) * row_bytes;
    for (int64_t i = 0; i < tokens; ++i) {
      ClearHidden(seen, tokens, s.k_len - tokens, row);
      seen += RowBytes(DType::kBit, tree.tokens);
      row += row_bytes;
    }
  }
}

Result<std::vector<uint8_t>> TreeFromParents(std::span<const int64_t> parents) {
  const int64_t tokens = std::ssize(parents);
  ATTEND_RETURN_IF_ERROR(CheckTreeTokens("the number of parents", tokens));
  const int64_t row_bytes = RowBytes(DType::kBit, tokens);
  std::vector<uint8_t> bits(static_cast<size_t>(TreeBytes(tokens)));
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t parent = parents[static_cast<size_t>(i)];
    if (parent < -1 || parent >= i) {
      return InvalidArgument("parents[" + std::to_string(i) + "] is " + std::to_string(parent) +
                             ", must be in [-1, " + std::to_string(i - 1) +
                             "]: a token before it, or -1");
    }
    uint8_t* const row = bits.data() + i * row_bytes;
    if (parent >= 0) std::copy_n(bits.data() + parent * row_bytes, row_bytes, row);
    row[i / 8] |= static_cast<uint8_t>(1u << (i % 8));
  }
  return bits;
}

}  // namespace attend
