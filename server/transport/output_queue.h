// SPDX-License-Identifier: Apache-2.0
//
// Bytes on their way out: small ones copied together, those of messages where they lie, kept by
// their owners until they have left. Not thread-safe. What adds may throw std::bad_alloc.

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

// A message on its way out. Each piece is kept by its owner, which is let go of once it has left.
struct OutMessage {
  struct Piece {
    std::string_view bytes;
    std::shared_ptr<const void> owner;
  };
  std::vector<Piece> pieces;

  // A message that owns its bytes.
  static OutMessage Of(std::string bytes) {
    const auto owned = std::make_shared<const std::string>(std::move(bytes));
    return {{{*owned, owned}}};
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const Piece& piece : pieces) sum += static_cast<int64_t>(piece.bytes.size());
    return sum;
  }
};

class OutputQueue {
 public:
  // From here on a piece costs less where it lies than copied.
  static constexpr size_t kCopyBytesMax = 1024;

  // Copied bytes lie in blocks of so many bytes, or more.
  explicit OutputQueue(size_t block_bytes = size_t{4} << 10) : block_bytes_(block_bytes) {}

  void Copy(std::string_view bytes) {
    if (bytes.empty()) return;
    if (pieces_.empty() || !pieces_.back().copied ||
        pieces_.back().block.size() + bytes.size() > pieces_.back().block.capacity()) {
      Piece piece;
      piece.copied = true;
      // On the heap, so that what earlier views see stays where it is when pieces move.
      piece.block.reserve(std::max({block_bytes_, bytes.size(), size_t{64}}));
      pieces_.push_back(std::move(piece));
    }
    pieces_.back().block.append(bytes);
    Count(bytes.size());
  }
  void Refer(std::string_view bytes, const std::shared_ptr<const void>& owner) {
    if (bytes.size() <= kCopyBytesMax) return Copy(bytes);
    Piece piece;
    piece.bytes = bytes;
    piece.owner = owner;
    pieces_.push_back(std::move(piece));
    Count(bytes.size());
  }
  // Moves the first `bytes`, of which there must be so many, to the end of `to`.
  void MoveTo(OutputQueue& to, size_t bytes) {
    while (bytes > 0) {
      const Piece& first = pieces_[first_];
      const std::string_view piece = first.view().substr(0, bytes);
      if (piece.empty()) {  // a block that was kept
        PopFirst();
        continue;
      }
      if (first.copied) {
        to.Copy(piece);
      } else {
        to.Refer(piece, first.owner);
      }
      bytes -= piece.size();
      Consume(piece.size());
    }
  }
  // The first pieces, as many as `vectors` takes. Returns how many that are.
  size_t Fill(std::span<iovec> vectors) const {
    size_t count = 0;
    for (size_t i = first_; i < pieces_.size() && count < vectors.size(); ++i) {
      const std::string_view view = pieces_[i].view();
      if (!view.empty()) vectors[count++] = {const_cast<char*>(view.data()), view.size()};
    }
    return count;
  }
  void Consume(size_t bytes) {
    size_ -= bytes;
    while (bytes > 0) {
      Piece& first = pieces_[first_];
      const size_t taken = std::min(bytes, first.view().size());
      first.offset += taken;
      bytes -= taken;
      if (first.view().empty()) PopFirst();
    }
  }
  void Clear() {
    pieces_.clear();
    first_ = 0;
    size_ = 0;
  }

  size_t size() const { return size_; }
  // Bytes that were added so far, and those of them that are gone.
  uint64_t added() const { return added_; }
  uint64_t gone() const { return added_ - size_; }
  bool empty() const { return size_ == 0; }

 private:
  struct Piece {
    bool copied = false;  // into `block`; else the bytes lie elsewhere
    std::string block;
    std::string_view bytes;
    std::shared_ptr<const void> owner;
    size_t offset = 0;

    std::string_view view() const {
      return (copied ? std::string_view(block) : bytes).substr(offset);
    }
  };

  void PopFirst() {
    Piece& popped = pieces_[first_];
    const bool usual = popped.copied && popped.block.capacity() <= 2 * block_bytes_;
    if (usual && first_ + 1 == pieces_.size()) {
      // The last block serves again.
      std::string block = std::move(popped.block);
      block.clear();
      pieces_.clear();
      first_ = 0;
      Piece piece;
      piece.copied = true;
      piece.block = std::move(block);
      pieces_.push_back(std::move(piece));  // there is room for it
      return;
    }
    popped = Piece();
    ++first_;
    if (2 * first_ < pieces_.size()) return;
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }
  void Count(size_t bytes) {
    size_ += bytes;
    added_ += bytes;
  }

  const size_t block_bytes_;
  std::vector<Piece> pieces_;
  size_t first_ = 0;  // of them that is not gone
  size_t size_ = 0;
  uint64_t added_ = 0;
};

}  // namespace attend
