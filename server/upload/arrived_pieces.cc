// SPDX-License-Identifier: Apache-2.0

#include "server/upload/arrived_pieces.h"

#include <algorithm>

namespace attend {

ArrivedPieces::ArrivedPieces(int64_t bytes, int64_t piece_bytes,
                             const std::vector<int64_t>& sections)
    : piece_bytes_(piece_bytes) {
  std::vector<int64_t> sizes;
  for (size_t n = 0; n < sections.size(); ++n) {
    const int64_t end = n + 1 < sections.size() ? sections[n + 1] : bytes;
    sections_.push_back({sections[n], end, static_cast<int64_t>(sizes.size())});
    for (int64_t at = sections[n]; at < end; at += piece_bytes) {
      sizes.push_back(std::min(piece_bytes, end - at));
    }
  }
  missing_bytes_ = std::vector<std::atomic<int64_t>>(sizes.size());
  for (size_t n = 0; n < sizes.size(); ++n) {
    missing_bytes_[n].store(sizes[n], std::memory_order_relaxed);
  }
}

const ArrivedPieces::Section& ArrivedPieces::SectionAt(int64_t offset) const {
  const auto behind =
      std::upper_bound(sections_.begin(), sections_.end(), offset,
                       [](int64_t at, const Section& section) { return at < section.begin; });
  return *std::prev(behind);
}

std::vector<ByteRange> ArrivedPieces::Add(const ByteRange& range) {
  std::vector<ByteRange> complete;
  for (int64_t at = range.begin; at < range.end;) {
    const Section& section = SectionAt(at);
    const int64_t piece = (at - section.begin) / piece_bytes_;
    const int64_t begin = section.begin + piece * piece_bytes_;
    const int64_t end = begin + std::min(piece_bytes_, section.end - begin);
    const int64_t came = std::min(end, range.end) - at;
    at += came;
    // Released by every call that adds bytes, acquired by the call that adds the last ones.
    std::atomic<int64_t>& missing =
        missing_bytes_[static_cast<size_t>(section.first_piece + piece)];
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
