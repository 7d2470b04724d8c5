// SPDX-License-Identifier: Apache-2.0
//
// The bytes of one message, in the pieces the transport delivered, and a view of them. One owner at
// a time.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/util/message.h"
#include "server/wire/slice_reader.h"

namespace attend {

class MessageSlices {
 public:
  // Takes the message. Borrowed bytes stay in the caller's buffer until Own.
  void Take(InMessage&& message);

  // Valid until Own is called; for borrowed bytes, also until this object is moved.
  std::span<const ByteSpan> spans() const {
    if (spans_.empty()) return {&lent_, size_t{lent() ? 1u : 0u}};
    return spans_;
  }
  // Adds bytes that are read as if they followed the message. They must outlive the spans.
  void Append(ByteSpan bytes) {
    if (spans_.empty() && lent()) spans_.push_back(lent_);
    spans_.push_back(bytes);
  }
  int64_t bytes() const { return bytes_; }
  bool lent() const { return lent_.data() != nullptr; }
  // Copies borrowed bytes, so that they outlive the caller's buffer.
  void Own();
  // Returns the memory to the transport.
  void Release();
  // Requires that nothing is borrowed.
  std::vector<MessagePiece> TakePieces() {
    spans_.clear();
    return std::move(pieces_);
  }

 private:
  int64_t bytes_ = 0;
  std::vector<MessagePiece> pieces_;
  ByteSpan lent_;
  std::vector<ByteSpan> spans_;  // empty: `lent_`, if it is set
};

}  // namespace attend
