// SPDX-License-Identifier: Apache-2.0
//
// One message as gRPC's slices, or as bytes that the transport lends, and a view of them. One owner
// at a time.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "server/wire/slice_reader.h"

namespace attend {

// The slices of a message, which go before it: gRPC 1.51 lets go of a slice's memory outside a call
// of its own, where its accounting crashes if the memory is short at that moment. A message's end
// is such a call.
class HeldSlices {
 public:
  HeldSlices() = default;
  HeldSlices(HeldSlices&& other) noexcept { Swap(other); }
  HeldSlices& operator=(HeldSlices&& other) noexcept {
    Swap(other);
    return *this;
  }

  // False if gRPC cannot give them. Leaves `message` empty.
  bool Take(grpc::ByteBuffer& message);
  // Puts one slice in the place of all.
  void Replace(grpc::Slice whole);
  const std::vector<grpc::Slice>& list() const { return list_; }

 private:
  void Swap(HeldSlices& other) noexcept {
    message_.Swap(&other.message_);
    list_.swap(other.list_);
  }

  grpc::ByteBuffer message_;  // destroyed last
  std::vector<grpc::Slice> list_;
};

// A message as it comes: gRPC's buffer, or bytes of the transport's that are there until the
// function that is given them returns. Neither: there is none.
struct ArrivedMessage {
  grpc::ByteBuffer* buffer = nullptr;
  std::string_view lent;

  bool Valid() const { return buffer == nullptr ? lent.data() != nullptr : buffer->Valid(); }
  int64_t bytes() const {
    return static_cast<int64_t>(buffer == nullptr ? lent.size() : buffer->Length());
  }
};

class MessageSlices {
 public:
  // Takes the slices out of `message`. If they are many and small, so that each costs more to keep
  // than its bytes, they are merged into one. False if gRPC cannot give them.
  bool Take(grpc::ByteBuffer& message);
  // Refers to them, wherever they are.
  void Lend(std::string_view bytes) {
    bytes_ = static_cast<int64_t>(bytes.size());
    lent_ = {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
  }

  // Valid until Own is called, and of what is lent, until this is moved.
  std::span<const ByteSpan> spans() const {
    if (spans_.empty()) return {&lent_, size_t{lent() ? 1u : 0u}};
    return spans_;
  }
  // Bytes that are to be read as if they followed the message. They must outlive the spans.
  void Append(ByteSpan bytes) {
    if (spans_.empty() && lent()) spans_.push_back(lent_);
    spans_.push_back(bytes);
  }
  int64_t bytes() const { return bytes_; }
  bool lent() const { return lent_.data() != nullptr; }
  // Copies what is lent, so that it stays.
  void Own();
  // Returns the memory to the transport.
  void Release();
  // None may be lent.
  HeldSlices TakeSlices() {
    spans_.clear();
    return std::move(slices_);
  }

 private:
  void Join();

  int64_t bytes_ = 0;
  HeldSlices slices_;
  ByteSpan lent_;
  std::vector<ByteSpan> spans_;  // empty: the one above, if that is any
};

}  // namespace attend
