// SPDX-License-Identifier: Apache-2.0

#include "server/wire/message_slices.h"

#include <string>
#include <string_view>
#include <utility>

namespace attend {
namespace {

ByteSpan SpanOf(std::string_view bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

}  // namespace

void MessageSlices::Take(InMessage&& message) {
  bytes_ = message.size();
  spans_.clear();
  pieces_ = std::move(message.pieces);
  lent_ = pieces_.empty() ? SpanOf(message.bytes) : ByteSpan();
  if (pieces_.empty()) return;
  spans_.reserve(pieces_.size());
  for (const MessagePiece& piece : pieces_) spans_.push_back(SpanOf(piece.bytes));
}

void MessageSlices::Own() {
  if (!lent()) return;
  const std::string_view bytes(reinterpret_cast<const char*>(lent_.data()), lent_.size());
  pieces_ = {OutMessage::PieceOf(std::string(bytes))};
  const ByteSpan own = SpanOf(pieces_.front().bytes);
  if (spans_.empty()) {
    spans_.push_back(own);
  } else {
    spans_.front() = own;
  }
  lent_ = {};
}

void MessageSlices::Release() {
  lent_ = {};
  spans_.clear();
  pieces_ = {};
}

}  // namespace attend
