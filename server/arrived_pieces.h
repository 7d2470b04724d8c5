// SPDX-License-Identifier: Apache-2.0
//
// Which pieces of a block, all of one size but the last, are complete: bytes arrive in any order
// and any ranges, and go on in pieces that are worth a copy each. No lock; any threads at once.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "server/byte_ranges.h"

namespace attend {

class ArrivedPieces {
 public:
  // `piece_bytes` is at least 1.
  ArrivedPieces(int64_t bytes, int64_t piece_bytes);

  // The bytes of `range`, which lies in the block, are there; each byte comes once. Returns the
  // pieces that this call has completed, neighbours as one range, in order: over all calls each
  // piece once, and to its receiver all of its bytes are visible.
  std::vector<ByteRange> Add(const ByteRange& range);

 private:
  const int64_t bytes_;
  const int64_t piece_bytes_;
  std::vector<std::atomic<int64_t>> missing_bytes_;  // of each piece
};

}  // namespace attend
