// SPDX-License-Identifier: Apache-2.0

#include "server/upload/arrived_pieces.h"

#include <algorithm>

namespace attend {

ArrivedPieces::ArrivedPieces(int64_t bytes, int64_t piece_bytes)
    : bytes_(bytes),
      piece_bytes_(piece_bytes),
      missing_bytes_(static_cast<size_t>((bytes + piece_bytes - 1) / piece_bytes)) {
  for (int64_t at = 0; at < bytes; at += piece_bytes) {
    const ByteRange piece = PieceAt(at);
    missing_bytes_[static_cast<size_t>(at / piece_bytes)].store(piece.end - piece.begin,
                                                                std::memory_order_relaxed);
  }
}

ByteRange ArrivedPieces::PieceAt(int64_t offset) const {
  const int64_t begin = offset - offset % piece_bytes_;
  return {begin, begin + std::min(piece_bytes_, bytes_ - begin)};
}

std::vector<ByteRange> ArrivedPieces::Add(const ByteRange& range) {
  std::vector<ByteRange> complete;
  for (int64_t at = range.begin; at < range.end;) {
    const ByteRange piece = PieceAt(at);
    const int64_t came = std::min(piece.end, range.end) - at;
    at += came;
    // Released by every call that adds bytes, acquired by the call that adds the last ones.
    auto& missing = missing_bytes_[static_cast<size_t>(piece.begin / piece_bytes_)];
    if (missing.fetch_sub(came, std::memory_order_acq_rel) != came) continue;
    if (!complete.empty() && complete.back().end == piece.begin) {
      complete.back().end = piece.end;
    } else {
      complete.push_back(piece);
    }
  }
  return complete;
}

}  // namespace attend
