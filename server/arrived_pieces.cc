// SPDX-License-Identifier: Apache-2.0

#include "server/arrived_pieces.h"

#include <algorithm>

namespace attend {

ArrivedPieces::ArrivedPieces(int64_t bytes, int64_t piece_bytes)
    : bytes_(bytes),
      piece_bytes_(piece_bytes),
      missing_bytes_(static_cast<size_t>(bytes / piece_bytes + (bytes % piece_bytes > 0 ? 1 : 0))) {
  for (size_t n = 0; n < missing_bytes_.size(); ++n) {
    const int64_t begin = static_cast<int64_t>(n) * piece_bytes;
    missing_bytes_[n].store(std::min(piece_bytes, bytes - begin), std::memory_order_relaxed);
  }
}

std::vector<ByteRange> ArrivedPieces::Add(const ByteRange& range) {
  std::vector<ByteRange> complete;
  for (int64_t at = range.begin; at < range.end;) {
    const int64_t piece = at / piece_bytes_;
    const int64_t begin = piece * piece_bytes_;
    const int64_t end = begin + std::min(piece_bytes_, bytes_ - begin);
    const int64_t came = std::min(end, range.end) - at;
    at += came;
    // Released by whoever brought bytes, acquired by whoever brings the last ones.
    std::atomic<int64_t>& missing = missing_bytes_[static_cast<size_t>(piece)];
    if (missing.fetch_sub(came, std::memory_order_acq_rel) != came) continue;
    if (!complete.empty() && complete.back().end == begin) {
      complete.back().end = end;
    } else {
      complete.push_back({begin, end});
    }
  }
  return complete;
}

}  // namespace attend
