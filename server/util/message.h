// SPDX-License-Identifier: Apache-2.0
//
// One message of a call, as the transport brings it and takes it: in pieces that are owned, so that
// none is copied on its way.

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

// Where parts of a large message that is still coming are to lie: its bytes from `begin` on at
// `to`.
struct MessagePlaces {
  struct Place {
    int64_t begin = 0;
    int64_t bytes = 0;
    char* to = nullptr;
  };

  MessagePlaces() = default;
  MessagePlaces(const MessagePlaces&) = delete;
  MessagePlaces& operator=(const MessagePlaces&) = delete;
  virtual ~MessagePlaces() = default;  // frees what `places` are in

  std::vector<Place> places;  // in the message's order, apart
};

// A message that has come: as `pieces` that stay for as long as their owners are held, or, without
// any, as `bytes` that are lent: they are in the buffer of the read, which is gone when the
// function that was given it returns.
struct InMessage {
  using Piece = MessagePiece;

  std::string_view bytes;
  std::vector<Piece> pieces;
  // In which some of the pieces are, if CallHandler::Place gave any.
  std::shared_ptr<MessagePlaces> places = {};

  int64_t size() const { return static_cast<int64_t>(bytes.size()) + BytesOf(pieces); }
  // A copy of it.
  std::string Text() const {
    std::string text(bytes);
    for (const Piece& piece : pieces) text += piece.bytes;
    return text;
  }
};

// A message on its way out. Each piece is kept by its owner, which is let go of once it has left.
struct OutMessage {
  using Piece = MessagePiece;

  Piece first;
  std::vector<Piece> rest;  // of large messages

  // A piece, and a message, that own their bytes.
  static Piece PieceOf(std::string bytes) {
    const auto owned = std::make_shared<const std::string>(std::move(bytes));
    return {*owned, owned};
  }
  static OutMessage Of(std::string bytes) { return {PieceOf(std::move(bytes)), {}}; }
  int64_t bytes() const { return static_cast<int64_t>(first.bytes.size()) + BytesOf(rest); }
};

}  // namespace attend
