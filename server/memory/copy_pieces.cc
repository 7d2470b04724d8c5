// SPDX-License-Identifier: Apache-2.0

#include "server/memory/copy_pieces.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels/util/trace_range.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

struct Copy {
  std::vector<HostPiece> pieces;
  std::vector<size_t> ends;  // of its parts, in `pieces`

  void Run(size_t part) const {
    const TraceRange range("attend: copy tensors");
    for (size_t i = part == 0 ? 0 : ends[part - 1]; i < ends[part]; ++i) {
      std::memcpy(pieces[i].to, pieces[i].from, static_cast<size_t>(pieces[i].bytes));
    }
  }
};

// Pieces above `part_bytes` are cut, so that one contiguous tensor is spread over threads too.
Copy Cut(const std::vector<HostPiece>& pieces, int64_t part_bytes) {
  Copy copy;
  copy.pieces.reserve(pieces.size());
  int64_t part = 0;
  for (const HostPiece& piece : pieces) {
    for (int64_t at = 0; at < piece.bytes; at += part_bytes) {
      const int64_t bytes = std::min(part_bytes, piece.bytes - at);
      copy.pieces.push_back(
          {static_cast<const char*>(piece.from) + at, static_cast<char*>(piece.to) + at, bytes});
      part += bytes;
      if (part < part_bytes) continue;
      copy.ends.push_back(copy.pieces.size());
      part = 0;
    }
  }
  if (part > 0) copy.ends.push_back(copy.pieces.size());
  return copy;
}

}  // namespace

void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                std::function<void()> done) {
  int64_t bytes = 0;
  for (const HostPiece& piece : pieces) bytes += piece.bytes;
  const int64_t part_bytes =
      std::clamp((bytes + workers.size() - 1) / workers.size(), thresholds::kCopyPartBytesMin,
                 thresholds::kCopyPartBytesMax);
  auto copy = std::make_shared<const Copy>(Cut(pieces, part_bytes));
  const size_t parts = copy->ends.size();
  workers.Post(
      parts, [copy = std::move(copy)](size_t part) { copy->Run(part); }, std::move(done));
}

}  // namespace attend
