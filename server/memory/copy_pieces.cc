// SPDX-License-Identifier: Apache-2.0
//
// The bytes of all pieces are cut into parts of equal size, about one per thread, within the bounds
// of thresholds::kCopyPartBytesMin and Max. A part has whole or cut pieces, of memory or of files;
// idle threads take the next part, so one large tensor spreads over the threads as well as many
// small ones.

#include "server/memory/copy_pieces.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/util/mutex.h"
#include "kernels/util/trace_range.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

// Pieces in parts of about part_bytes. Larger ones are cut, so that a single contiguous tensor is
// spread over the threads too.
class Copy {
 public:
  explicit Copy(int64_t part_bytes) : part_bytes_(part_bytes) {}

  void Add(const FilePiece& whole) {
    for (int64_t at = 0; at < whole.bytes; at += part_bytes_) {
      const int64_t bytes = std::min(part_bytes_, whole.bytes - at);
      FilePiece& piece = pieces_.emplace_back(whole);
      piece.offset += at;
      if (piece.to != nullptr) piece.to = static_cast<char*>(piece.to) + at;
      if (piece.from != nullptr) piece.from = static_cast<const char*>(piece.from) + at;
      piece.bytes = bytes;
      if (ends_.empty() || part_ >= part_bytes_) {
        ends_.push_back(0);
        part_ = 0;
      }
      ends_.back() = pieces_.size();
      part_ += bytes;
    }
  }
  size_t parts() const { return ends_.size(); }
  void Run(size_t part) {
    const TraceRange range("attend: copy tensors");
    for (size_t i = part == 0 ? 0 : ends_[part - 1]; i < ends_[part]; ++i) {
      Status result = pieces_[i].Copy();
      if (result.ok()) continue;
      const MutexLock lock(mutex_);
      if (status_.ok()) status_ = std::move(result);
      return;
    }
  }
  Status TakeStatus() {
    const MutexLock lock(mutex_);
    return std::move(status_);
  }

 private:
  const int64_t part_bytes_;
  std::vector<FilePiece> pieces_;
  std::vector<size_t> ends_;  // end of each part in pieces_
  int64_t part_ = 0;          // bytes of the last part
  Mutex mutex_;
  Status status_ ATTEND_GUARDED_BY(mutex_);  // the first error
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
  const auto copy = std::make_shared<Copy>(part_bytes);
  for (const HostPiece& piece : pieces) copy->Add({nullptr, 0, piece.to, piece.from, piece.bytes});
  for (const FilePiece& piece : files) copy->Add(piece);
  workers.Post(
      copy->parts(), [copy](size_t part) { copy->Run(part); },
      [copy, done = std::move(done)] { done(copy->TakeStatus()); });
}

void CopyPieces(WorkerThreads& workers, const std::vector<HostPiece>& pieces,
                std::function<void()> done) {
  CopyPieces(workers, pieces, {}, [done = std::move(done)](const Status&) { done(); });
}

}  // namespace attend
