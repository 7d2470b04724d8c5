// SPDX-License-Identifier: Apache-2.0
//
// Decides which sequences cpu_flash decodes: those with few query rows, whose time goes into
// reading K and V. Cost (cost.h) depends on the rule too.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend {

// Query rows of all heads of a group together. Up to kDecodeRowsAlways always decode; up to
// kDecodeRows decode if they see at least kDecodeKeysOfRow keys per row. With more, rows fill a
// tile's vectors well enough for packing K and V to pay (tests/bench/KERNELS.md).
inline constexpr int64_t kDecodeRows = 24;
inline constexpr int64_t kDecodeRowsAlways = 4;
inline constexpr int64_t kDecodeKeysOfRow = 32;

// Keys [begin, end) that at least one row of the sequence sees; {0, 0} if none.
inline KeyRange SeenKeys(const Problem& p, const Sequence& s) {
  KeyRange seen{s.k_len, 0};
  for (int64_t i = 0; i < s.q_len; ++i) {
    const KeyRange range = VisibleKeys(p.mask, s, i);
    if (range.begin >= range.end) continue;
    seen.begin = std::min(seen.begin, range.begin);
    seen.end = std::max(seen.end, range.end);
  }
  return seen.begin < seen.end ? seen : KeyRange{0, 0};
}

// Whether a sequence's true rows are decoded. Padding rows never are, nor is dropout.
inline bool Decodes(const Problem& p, const Sequence& s) {
  const int64_t rows = s.q_len * p.group();
  if (rows == 0 || rows > kDecodeRows || p.dropout > 0) return false;
  if (rows <= kDecodeRowsAlways) return true;
  const KeyRange seen = SeenKeys(p, s);
  return seen.end - seen.begin >= rows * kDecodeKeysOfRow;
}

}  // namespace attend
