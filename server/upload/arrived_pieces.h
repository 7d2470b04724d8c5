// SPDX-License-Identifier: Apache-2.0
//
// Tracks which pieces of a block are complete: bytes arrive in any order and in any ranges, and are
// passed on in pieces that are worth a copy each. Lock-free; thread-safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "server/util/byte_ranges.h"

namespace attend {

class ArrivedPieces {
 public:
  // All pieces have `piece_bytes`, at least 1, except the last.
  ArrivedPieces(int64_t bytes, int64_t piece_bytes);

  // The bytes of `range`, which is within the block, have arrived; each byte arrives once. Returns
  // the pieces that this call has completed, in order, with neighbours merged. Over all calls each
  // piece is returned once, and all of its bytes are visible to the caller that gets it.
  std::vector<ByteRange> Add(const ByteRange& range);

 private:
  ByteRange PieceAt(int64_t offset) const;

  const int64_t bytes_;
  const int64_t piece_bytes_;
  std::vector<std::atomic<int64_t>> missing_bytes_;  // of each piece
};

}  // namespace attend
