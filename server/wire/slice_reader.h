// SPDX-License-Identifier: Apache-2.0
//
// A cursor over bytes in pieces, as delivered by a transport. Independent of the transport; owns
// nothing; used by one thread.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"

namespace attend {

using ByteSpan = std::span<const uint8_t>;

class SliceReader {
 public:
  // `slices` must outlive the reader.
  explicit SliceReader(std::span<const ByteSpan> slices);

  int64_t position() const { return position_; }
  int64_t remaining() const { return total_ - position_; }

  // Reads a base-128 varint of at most 10 bytes. On failure returns false and leaves the position
  // undefined.
  bool ReadVarint(uint64_t* value);
  // False, without moving, if fewer bytes remain.
  bool Skip(int64_t bytes);
  // Copies the next `bytes`, which must remain. Pieces that are already in place are skipped.
  void Read(void* to, int64_t bytes);
  // Appends the next `bytes`, which must remain, as pieces of a copy to `to`, and moves past them.
  // Pieces that are already in place are left out.
  void ReadPieces(void* to, int64_t bytes, std::vector<HostPiece>& pieces);
  // Calls take(piece) for each contiguous piece of the next `bytes`, which must remain, and moves
  // past them.
  template <class Take>
  void ForEachPiece(int64_t bytes, const Take& take) {
    while (bytes > 0) {
      const ByteSpan here = slices_[slice_].subspan(static_cast<size_t>(offset_));
      const ByteSpan piece = here.first(std::min(static_cast<size_t>(bytes), here.size()));
      Advance(static_cast<int64_t>(piece.size()));
      bytes -= static_cast<int64_t>(piece.size());
      take(piece);
    }
  }

 private:
  void Advance(int64_t bytes);  // within the current slice
  void SkipEmpty();

  std::span<const ByteSpan> slices_;
  size_t slice_ = 0;
  int64_t offset_ = 0;  // in the current slice
  int64_t position_ = 0;
  int64_t total_ = 0;
};

}  // namespace attend
