// SPDX-License-Identifier: Apache-2.0
//
// What a GPU's backward pass keeps of each query row before it walks the keys, and how much memory
// that takes: the only memory it needs beside its tensors.

#pragma once

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

// A sequence's terms begin at multiples of this, as the copy engine needs (16 bytes).
inline constexpr int kTermAlignment = 4;
// Terms that a tile of a sequence's last rows may read beyond them: of others, or of nobody.
inline constexpr int kTermSlack = 128;
inline constexpr int64_t kTermFlagBytes = 256;  // before the terms

// Terms of one head. Packed sequences may begin anywhere: each has up to an alignment more.
ATTEND_HD inline int64_t TermsOfHead(const Problem& p) {
  return p.packed ? (p.total_q / kTermAlignment + p.batch) * kTermAlignment
                  : (p.len_q + kTermAlignment - 1) / kTermAlignment * kTermAlignment * p.batch;
}
ATTEND_HD inline int64_t TermIndex(const Problem& p, const Sequence& s, int64_t b, int64_t h,
                                   int64_t i) {
  const int64_t first = p.packed
                            ? (s.q_row / kTermAlignment + b) * kTermAlignment
                            : (p.len_q + kTermAlignment - 1) / kTermAlignment * kTermAlignment * b;
  return h * TermsOfHead(p) + first + i;
}

// Two floats for each of all heads' terms, with slack after either, and the flag.
inline Result<int64_t> GradientTermsBytes(const Problem& p) {
  const Result<int64_t> terms = CheckedProduct("terms of query rows", TermsOfHead(p), p.heads_q);
  if (!terms.ok()) return terms;
  const Result<int64_t> bytes =
      CheckedProduct("bytes of terms", *terms + kTermSlack, 2 * sizeof(float));
  if (!bytes.ok()) return bytes;
  return *bytes + kTermFlagBytes;
}

}  // namespace attend
