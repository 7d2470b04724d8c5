// SPDX-License-Identifier: Apache-2.0
//
// The bytes of all pieces are cut into parts of equal size, about one per thread, within the bounds
// of thresholds::kCopyPartBytesMin and Max. A part has whole or cut pieces, of memory or of files;
// idle threads take the next part, so one large tensor spreads over the threads as well as many
// small ones.

#include "server/memory/copy_pieces.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels/util/mutex.h"
#include "kernels/util/trace_range.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

HostPiece Sub(const HostPiece& piece, int64_t at, int64_t bytes) {
  return {static_cast<const char*>(piece.from) + at, static_cast<char*>(piece.to) + at, bytes};
}

FilePiece Sub(const FilePiece& piece, int64_t at, int64_t bytes) {
  FilePiece sub = piece;
  sub.offset += at;
  if (sub.to != nullptr) sub.to = static_cast<char*>(sub.to) + at;
  if (sub.from != nullptr) sub.from = static_cast<const char*>(sub.from) + at;
  sub.bytes = bytes;
  return sub;
}

Status CopyOne(const HostPiece& piece) {
  std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  return Status();
}

Status CopyOne(const FilePiece& piece) { return piece.Copy(); }

// Pieces of one kind, grouped into parts of about part_bytes.
template <class Piece>
struct Parts {
  std::vector<Piece> pieces;
  std::vector<size_t> ends;  // end of each part in `pieces`

  // Larger pieces are cut, so that a single contiguous tensor is spread over the threads too.
  Parts(const std::vector<Piece>& whole, int64_t part_bytes) {
    pieces.reserve(whole.size());
    int64_t part = 0;
    for (const Piece& piece : whole) {
      for (int64_t at = 0; at < piece.bytes; at += part_bytes) {
        const int64_t bytes = std::min(part_bytes, piece.bytes - at);
        pieces.push_back(Sub(piece, at, bytes));
        part += bytes;
        if (part < part_bytes) continue;
        ends.push_back(pieces.size());
        part = 0;
      }
    }
    if (part > 0) ends.push_back(pieces.size());
  }

  Status Run(size_t part) const {
    Status status;
    for (size_t i = part == 0 ? 0 : ends[part - 1]; i < ends[part] && status.ok(); ++i) {
      status = CopyOne(pieces[i]);
    }
    return status;
  }
};

struct Copy {
  Parts<HostPiece> memory;
  Parts<FilePiece> files;
  Mutex mutex;
  Status status ATTEND_GUARDED_BY(mutex);  // the first error

  size_t parts() const { return memory.ends.size() + files.ends.size(); }
  void Run(size_t part) {
    const TraceRange range("attend: copy tensors");
    const size_t first_file = memory.ends.size();
    Status result = part < first_file ? memory.Run(part) : files.Run(part - first_file);
    if (result.ok()) return;
    const MutexLock lock(mutex);
    if (status.ok()) status = std::move(result);
  }
  Status TakeStatus() {
    const MutexLock lock(mutex);
    return std::move(status);
  }
};

}  // namespace

void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                const std::vector<FilePiece>& files, std::function<void(const Status&)> done) {
  int64_t bytes = 0;
  for (const HostPiece& piece : pieces) bytes += piece.bytes;
  for (const FilePiece& piece : files) bytes += piece.bytes;
  const int64_t part_bytes =
      std::clamp((bytes + workers.size() - 1) / workers.size(), thresholds::kCopyPartBytesMin,
                 thresholds::kCopyPartBytesMax);
  const std::shared_ptr<Copy> copy(new Copy{{pieces, part_bytes}, {files, part_bytes}, {}, {}});
  workers.Post(
      copy->parts(), [copy](size_t part) { copy->Run(part); },
      [copy, done = std::move(done)] { done(copy->TakeStatus()); });
}

void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                std::function<void()> done) {
  CopyPieces(workers, pieces, {}, [done = std::move(done)](const Status&) { done(); });
}

}  // namespace attend
