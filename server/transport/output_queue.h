// SPDX-License-Identifier: Apache-2.0
//
// Output bytes: small pieces are copied together, message data is referenced and kept alive by its
// owner until sent. Not thread-safe. Functions that add bytes may throw std::bad_alloc.

#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attend {

class OutputQueue {
 public:
  // From this size on, referencing a piece is cheaper than copying it.
  static constexpr size_t kCopyBytesMax = 1024;

  // Copied bytes are stored in blocks of at least `block_bytes`.
  explicit OutputQueue(size_t block_bytes = size_t{4} << 10) : block_bytes_(block_bytes) {}

  void Copy(std::string_view bytes) {
    if (bytes.empty()) return;
    if (block_ == nullptr || block_->capacity() - block_->size() < bytes.size()) {
      block_ = std::make_shared<std::string>();
      // At least 64 bytes: on the heap, so it does not move.
      block_->reserve(std::max({block_bytes_, bytes.size(), size_t{64}}));
    }
    const char* const at = block_->data() + block_->size();
    if (!pieces_.empty() && pieces_.back().bytes.end() == at && pieces_.back().owner == block_) {
      Piece& last = pieces_.back();
      last.bytes = {last.bytes.data(), last.bytes.size() + bytes.size()};
    } else {
      pieces_.push_back({{at, bytes.size()}, block_});
    }
    block_->append(bytes);
    Count(bytes.size());
  }
  void Refer(std::string_view bytes, std::shared_ptr<const void> owner) {
    if (bytes.size() <= kCopyBytesMax) return Copy(bytes);
    pieces_.push_back({bytes, std::move(owner)});
    Count(bytes.size());
  }
  // Moves the first `bytes`, which must exist, to the end of `to`.
  void MoveTo(OutputQueue& to, size_t bytes) {
    while (bytes > 0) {
      Piece& first = pieces_[first_];
      const std::string_view piece = first.bytes.substr(0, bytes);
      if (piece.size() < first.bytes.size()) {
        to.Refer(piece, first.owner);
      } else {
        to.Refer(piece, std::move(first.owner));
      }
      bytes -= piece.size();
      Consume(piece.size());
    }
  }
  // Fills `vectors` with the first pieces. Returns the number of entries used.
  size_t Fill(std::span<iovec> vectors) const {
    size_t count = 0;
    for (size_t i = first_; i < pieces_.size() && count < vectors.size(); ++i) {
      const std::string_view view = pieces_[i].bytes;
      vectors[count++] = {const_cast<char*>(view.data()), view.size()};
    }
    return count;
  }
  void Consume(size_t bytes) {
    size_ -= bytes;
    while (bytes > 0) {
      Piece& first = pieces_[first_];
      const size_t taken = std::min(bytes, first.bytes.size());
      first.bytes.remove_prefix(taken);
      bytes -= taken;
      if (first.bytes.empty()) PopFirst();
    }
  }
  // Empties the queue; keeps little memory.
  void Clear() {
    first_ = 0;
    size_ = 0;
    pieces_.clear();
    if (pieces_.capacity() > kPiecesKept) std::vector<Piece>().swap(pieces_);
    KeepBlock();
  }

  size_t size() const { return size_; }
  // Bytes added so far, and how many of them are gone.
  uint64_t added() const { return added_; }
  uint64_t gone() const { return added_ - size_; }
  bool empty() const { return size_ == 0; }

 private:
  static constexpr size_t kPiecesKept = 64;

  struct Piece {
    std::string_view bytes;
    std::shared_ptr<const void> owner;  // of copied bytes: their block
  };

  void PopFirst() {
    pieces_[first_].owner.reset();
    if (++first_ == pieces_.size()) {
      pieces_.clear();
      first_ = 0;
      return KeepBlock();
    }
    if (2 * first_ < pieces_.size()) return;
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }
  // Keeps the block for the next bytes, unless it is large or still in use. Without pieces only.
  void KeepBlock() {
    if (block_ == nullptr) return;
    if (block_.use_count() > 1 || block_->capacity() > 2 * block_bytes_) return block_.reset();
    block_->clear();
  }
  void Count(size_t bytes) {
    size_ += bytes;
    added_ += bytes;
  }

  size_t block_bytes_;
  std::vector<Piece> pieces_;
  size_t first_ = 0;                    // the first remaining piece
  std::shared_ptr<std::string> block_;  // of the newest copied bytes
  size_t size_ = 0;
  uint64_t added_ = 0;
};

}  // namespace attend
