// SPDX-License-Identifier: Apache-2.0
//
// Bytes on their way out: small ones copied together, those of messages where they lie, kept by
// their owners until they have left. Not thread-safe. What adds may throw std::bad_alloc.

#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
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

  void Copy(std::string_view bytes) {
    if (bytes.empty()) return;
    if (pieces_.empty() || pieces_.back().block == nullptr ||
        pieces_.back().block->size() + bytes.size() > kBlockBytes) {
      Piece piece;
      piece.block = std::make_unique<std::string>();
      piece.block->reserve(std::max(kBlockBytes, bytes.size()));
      pieces_.push_back(std::move(piece));
    }
    // It has its memory, so what earlier views see stays where it is.
    pieces_.back().block->append(bytes);
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
      const Piece& first = pieces_.front();
      const std::string_view piece = first.view().substr(0, bytes);
      to.Refer(first.block == nullptr ? piece : std::string_view(), first.owner);
      if (first.block != nullptr) to.Copy(piece);
      bytes -= piece.size();
      Consume(piece.size());
    }
  }
  // The first pieces, as many as `vectors` takes. Returns how many that are.
  size_t Fill(std::span<iovec> vectors) const {
    size_t count = 0;
    for (const Piece& piece : pieces_) {
      if (count == vectors.size()) break;
      const std::string_view view = piece.view();
      vectors[count++] = {const_cast<char*>(view.data()), view.size()};
    }
    return count;
  }
  void Consume(size_t bytes) {
    size_ -= bytes;
    while (bytes > 0) {
      Piece& first = pieces_.front();
      const size_t taken = std::min(bytes, first.view().size());
      first.offset += taken;
      bytes -= taken;
      if (first.view().empty()) pieces_.pop_front();
    }
  }
  void Clear() {
    pieces_.clear();
    size_ = 0;
  }

  size_t size() const { return size_; }
  // Bytes that were added so far, and those of them that are gone.
  uint64_t added() const { return added_; }
  uint64_t gone() const { return added_ - size_; }
  bool empty() const { return size_ == 0; }

 private:
  static constexpr size_t kBlockBytes = size_t{4} << 10;

  struct Piece {
    std::unique_ptr<std::string> block;  // null: the bytes lie elsewhere
    std::string_view bytes;
    std::shared_ptr<const void> owner;
    size_t offset = 0;

    std::string_view view() const {
      return (block != nullptr ? std::string_view(*block) : bytes).substr(offset);
    }
  };

  void Count(size_t bytes) {
    size_ += bytes;
    added_ += bytes;
  }

  std::deque<Piece> pieces_;
  size_t size_ = 0;
  uint64_t added_ = 0;
};

}  // namespace attend
