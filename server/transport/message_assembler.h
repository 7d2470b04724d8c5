// SPDX-License-Identifier: Apache-2.0
//
// Splits a stream's bytes into gRPC messages. Each has a five-byte prefix: the compressed flag and
// the length.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/status.h"
#include "server/transport/message_bound.h"
#include "server/util/message.h"

namespace attend {

// A block that a connection reads into, and in which parts of messages may stay.
struct ReadBlock {
  std::shared_ptr<char[]> memory;
  size_t used_bytes = 0;
  size_t referenced_bytes = 0;  // referenced by messages
};

// A small message that arrives in one piece is handed out in place. Other messages are gathered as
// their bytes arrive, so an announced length alone takes no memory: bytes in a block are
// referenced, others are copied, to the places of a large message if the handler gave any. After an
// error the stream cannot be continued.
class MessageAssembler {
 public:
  static constexpr size_t kPrefixBytes = 5;

  // `encoding` names the compression, for the error message: compressed messages are refused.
  explicit MessageAssembler(MessageBound bound, std::string encoding = {})
      : bound_(bound), encoding_(std::move(encoding)) {}

  // Takes the bytes of the next message from the front of `bytes`. `whole`: it is complete, in
  // `message`; call again for the rest of `bytes`. `block`: holds `bytes`, if they may stay there;
  // else null. May throw std::bad_alloc.
  Status Take(std::string_view& bytes, ReadBlock* block, InMessage& message, bool& whole);

  // A large message has begun and Place has not been called for it. Its first bytes are `begun`.
  bool MayPlace() const { return gathered_bytes_ > 0 && MayBePlaced(); }
  std::span<const MessagePiece> begun() const { return pieces_; }
  // Following bytes go to these places, as far as they have one. May be null.
  void Place(std::shared_ptr<MessagePlaces> places);
  bool placed() const { return places_ != nullptr; }
  // The place of the next bytes of the current message, as long as it is contiguous. Empty: none.
  std::span<char> Room() const;

  // Discards the current message; no more of it may be taken.
  void Drop();
  // Whether a message has begun and is not complete.
  bool under_way() const { return prefix_bytes_ > 0; }
  // Memory used by the current message, its places included.
  int64_t held_bytes() const { return held_bytes_; }
  // Length of the newest message whose prefix is complete.
  size_t message_bytes() const { return length_; }

 private:
  Status TakePrefix(std::string_view& bytes);
  void Gather(std::string_view& bytes, ReadBlock* block);
  void Refer(std::string_view bytes, ReadBlock& block);
  // Takes bytes that belong to Room(), where they may already be.
  void Settle(std::string_view bytes);
  bool MayBePlaced() const;
  size_t BytesToPlace() const;
  // Counts gathered bytes and skips places that are full.
  void Advance(size_t bytes);
  void Copy(std::string_view bytes, size_t piece_bytes_max);

  const MessageBound bound_;
  const std::string encoding_;
  size_t prefix_bytes_ = 0;
  uint8_t prefix_[kPrefixBytes] = {};
  size_t length_ = 0;
  size_t gathered_bytes_ = 0;
  int64_t held_bytes_ = 0;
  std::vector<InMessage::Piece> pieces_;
  // The newest piece, if it was copied; it never grows beyond its reserved capacity.
  std::shared_ptr<std::string> copied_;
  bool place_asked_ = false;
  std::shared_ptr<MessagePlaces> places_;
  size_t place_ = 0;  // the first place that is not full
};

}  // namespace attend
