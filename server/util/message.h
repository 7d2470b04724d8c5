// SPDX-License-Identifier: Apache-2.0
//
// A message of a call, as the transport receives and sends it: owned pieces, so that no byte is
// copied on the way.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attend {

struct MessagePiece {
  std::string_view bytes;
  std::shared_ptr<const void> owner;
};

inline int64_t BytesOf(const std::vector<MessagePiece>& pieces) {
  int64_t sum = 0;
  for (const MessagePiece& piece : pieces) sum += static_cast<int64_t>(piece.bytes.size());
  return sum;
}

// The destinations of parts of a large message that is still arriving: its bytes from `begin` on go
// to `to`.
struct MessagePlaces {
  struct Place {
    int64_t begin = 0;
    int64_t bytes = 0;
    char* to = nullptr;
  };

  MessagePlaces() = default;
  MessagePlaces(const MessagePlaces&) = delete;
  MessagePlaces& operator=(const MessagePlaces&) = delete;
  virtual ~MessagePlaces() = default;  // frees the memory that `places` point to

  std::vector<Place> places;  // in message order, disjoint
};

// A received message: either `pieces`, which stay valid while their owners are held; or, without
// pieces, `bytes`, which are borrowed from the read buffer and valid only until the receiving
// function returns.
struct InMessage {
  using Piece = MessagePiece;

  std::string_view bytes;
  std::vector<Piece> pieces;
  // Owns the memory of those pieces that were stored at places from CallHandler::Place.
  std::shared_ptr<MessagePlaces> places = {};

  int64_t size() const { return static_cast<int64_t>(bytes.size()) + BytesOf(pieces); }
  // A copy of the bytes.
  std::string Text() const {
    std::string text(bytes);
    for (const Piece& piece : pieces) text += piece.bytes;
    return text;
  }
};

// A message to be sent. Each piece is kept alive by its owner, which is released once it has left.
struct OutMessage {
  using Piece = MessagePiece;

  Piece first;
  std::vector<Piece> rest;  // for large messages

  // A piece, and a message, that own their bytes.
  static Piece PieceOf(std::string bytes) {
    const auto owned = std::make_shared<const std::string>(std::move(bytes));
    return {*owned, owned};
  }
  static OutMessage Of(std::string bytes) { return {PieceOf(std::move(bytes)), {}}; }
  int64_t bytes() const { return static_cast<int64_t>(first.bytes.size()) + BytesOf(rest); }
};

}  // namespace attend
