// SPDX-License-Identifier: Apache-2.0
//
// A request's tensors as they arrived in its message: pieces in the transport's own memory, which
// is page-locked, and their places in the request's input block, to which they have not been
// copied. A device that gathers reads the pieces; for any other use they are copied first.

#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"

namespace attend {

class GatheredInput {
 public:
  // `owner` keeps the pieces' memory alive. The pieces are in ascending order of their places.
  GatheredInput(std::vector<HostPiece> pieces, std::shared_ptr<const void> owner)
      : pieces_(std::move(pieces)), owner_(std::move(owner)) {}

  const std::vector<HostPiece>& pieces() const { return pieces_; }

  int64_t bytes() const {
    int64_t sum = 0;
    for (const HostPiece& piece : pieces_) sum += piece.bytes;
    return sum;
  }

  // Copies every piece to its place.
  void CopyToPlaces() const {
    for (const HostPiece& piece : pieces_) {
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    }
  }

 private:
  const std::vector<HostPiece> pieces_;
  const std::shared_ptr<const void> owner_;
};

}  // namespace attend
