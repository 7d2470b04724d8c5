// SPDX-License-Identifier: Apache-2.0
//
// Which sequences cpu_flash decodes: those with few query rows, for which reading K and V takes the
// time. What a request costs (cost.h) depends on it too.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend {

// Query rows of all heads of a group together: at most so many are decoded, and more than the
// fewest only if they see that many keys for each. Beyond, rows fill a tile's vectors well enough
// for packing K and V to pay (tests/bench/KERNELS.md).
inline constexpr int64_t kDecodeRows = 24;
inline constexpr int64_t kDecodeRowsAlways = 4;
inline constexpr int64_t kDecodeKeysOfRow = 32;

// Keys [begin, end) that some row of the sequence sees; empty: {0, 0}.
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

// Whether the true rows of a sequence are decoded; padding never is, nor what has dropout.
inline bool Decodes(const Problem& p, const Sequence& s) {
  const int64_t rows = s.q_len * p.group();
  if (rows == 0 || rows > kDecodeRows || p.dropout > 0) return false;
  if (rows <= kDecodeRowsAlways) return true;
  const KeyRange seen = SeenKeys(p, s);
  return seen.end - seen.begin >= rows * kDecodeKeysOfRow;
}

}  // namespace attend
