// SPDX-License-Identifier: Apache-2.0
//
// Tracks which pieces of a block are complete: bytes arrive in any order and in any ranges, and are
// passed on in pieces that are worth a copy each. The block has sections. All pieces of a section
// have the same size, except its last, so late bytes in one section hold back nothing of the next.
// Lock-free; thread-safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "server/util/byte_ranges.h"

namespace attend {

class ArrivedPieces {
 public:
  // `piece_bytes` is at least 1. `sections`: where sections begin, ascending, the first at 0; each
  // ends where the next begins, the last at `bytes`.
  ArrivedPieces(int64_t bytes, int64_t piece_bytes, const std::vector<int64_t>& sections = {0});

  // The bytes of `range`, which is within the block, have arrived; each byte arrives once. Returns
  // the pieces that this call has completed, in order, with neighbours merged. Over all calls each
  // piece is returned once, and all of its bytes are visible to the caller that gets it.
  std::vector<ByteRange> Add(const ByteRange& range);

 private:
  struct Section {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t first_piece = 0;
  };
  const Section& SectionAt(int64_t offset) const;

  const int64_t piece_bytes_;
  std::vector<Section> sections_;
  std::vector<std::atomic<int64_t>> missing_bytes_;  // of each piece
};

}  // namespace attend
