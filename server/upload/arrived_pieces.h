// SPDX-License-Identifier: Apache-2.0
//
// Which pieces of a block are complete: bytes arrive in any order and any ranges, and go on in
// pieces that are worth a copy each. The block has sections, and all pieces of one have the same
// size but its last; so what comes late in one section holds back nothing of the next. No lock; any
// threads at once.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "server/util/byte_ranges.h"

namespace attend {

class ArrivedPieces {
 public:
  // `piece_bytes` is at least 1. `sections`: where they begin, ascending, the first at 0; each ends
  // where the next begins, the last at `bytes`.
  ArrivedPieces(int64_t bytes, int64_t piece_bytes, const std::vector<int64_t>& sections = {0});

  // The bytes of `range`, which lies in the block, are there; each byte comes once. Returns the
  // pieces that this call has completed, neighbours as one range, in order: over all calls each
  // piece once, and to its receiver all of its bytes are visible.
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
