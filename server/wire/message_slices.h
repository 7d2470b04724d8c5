// SPDX-License-Identifier: Apache-2.0
//
// One message as gRPC's slices, and a view of their bytes. One owner at a time; the view stays
// valid when it is moved.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <span>
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

class MessageSlices {
 public:
  // Takes the slices out of `message`. If they are many and small, so that each costs more to keep
  // than its bytes, they are merged into one. False if gRPC cannot give them.
  bool Take(grpc::ByteBuffer& message);

  std::span<const ByteSpan> spans() const { return spans_; }
  // Bytes that are to be read as if they followed the message. They must outlive the spans.
  void Append(ByteSpan bytes) { spans_.push_back(bytes); }
  int64_t bytes() const { return bytes_; }
  // Returns the memory to the transport.
  void Release();
  HeldSlices TakeSlices() {
    spans_.clear();
    return std::move(slices_);
  }

 private:
  void Join();

  int64_t bytes_ = 0;
  HeldSlices slices_;
  std::vector<ByteSpan> spans_;
};

}  // namespace attend
