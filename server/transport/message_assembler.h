// SPDX-License-Identifier: Apache-2.0
//
// Cuts the bytes of a stream into gRPC's messages, each of which stands behind five bytes: whether
// it is compressed, and its length.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/status.h"
#include "server/util/message.h"

namespace attend {

// A block that a connection reads into, in which parts of messages may stay.
struct ReadBlock {
  std::shared_ptr<char[]> memory;
  size_t used_bytes = 0;
  size_t referenced_bytes = 0;  // by messages
};

// A small message of which all bytes come in one piece is handed out where it lies. Of others the
// bytes are gathered as they come, so that a length alone takes no memory: what lies in a block is
// referred to, the rest is copied, to the places that a large message has been given if it has any.
// After an error the stream is of no more use.
class MessageAssembler {
 public:
  static constexpr size_t kPrefixBytes = 5;

  // `encoding` is that of compressed messages, which are refused: none is inflated.
  explicit MessageAssembler(int64_t message_bytes_max, std::string encoding = {})
      : message_bytes_max_(message_bytes_max), encoding_(std::move(encoding)) {}

  // Takes from `bytes` what belongs to the next message. `whole`: it has come, and is in `message`;
  // call again for what is left of `bytes`. `block`: where they lie, if they may stay there; else
  // null. May throw std::bad_alloc.
  Status Take(std::string_view& bytes, ReadBlock* block, InMessage& message, bool& whole);

  // A large message has begun, and Place has not been called for it. Its first bytes are `begun`.
  bool MayPlace() const { return gathered_bytes_ > 0 && MayBePlaced(); }
  std::span<const MessagePiece> begun() const { return pieces_; }
  // The bytes that follow go to these places, as far as they have one. May be null.
  void Place(std::shared_ptr<MessagePlaces> places);
  bool placed() const { return places_ != nullptr; }
  // Where the next bytes of the message under way belong, as many as lie there. Empty: anywhere.
  std::span<char> Room() const;

  // Forgets the message under way, of which no more is taken.
  void Drop();
  // Whether a message has begun and has not ended.
  bool under_way() const { return prefix_bytes_ > 0; }
  // Memory that the message under way takes.
  int64_t held_bytes() const { return held_bytes_; }
  // The length of the newest message whose length is known.
  size_t message_bytes() const { return length_; }

 private:
  Status TakePrefix(std::string_view& bytes);
  void Gather(std::string_view& bytes, ReadBlock* block);
  void Refer(std::string_view bytes, ReadBlock& block);
  // Bytes that belong to Room(), where they may lie already.
  void Settle(std::string_view bytes);
  bool MayBePlaced() const;
  size_t BytesToPlace() const;
  // So many bytes more have been gathered: the next place is one that lacks some.
  void Advance(size_t bytes);
  void Copy(std::string_view bytes, size_t piece_bytes_max);

  const int64_t message_bytes_max_;
  const std::string encoding_;
  size_t prefix_bytes_ = 0;
  uint8_t prefix_[kPrefixBytes] = {};
  size_t length_ = 0;
  size_t gathered_bytes_ = 0;
  int64_t held_bytes_ = 0;
  std::vector<InMessage::Piece> pieces_;
  // The newest of them, if it was copied: it does not grow beyond what it was given.
  std::shared_ptr<std::string> copied_;
  bool place_asked_ = false;
  std::shared_ptr<MessagePlaces> places_;
  size_t place_ = 0;  // the first that is not full
};

}  // namespace attend
