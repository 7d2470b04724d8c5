// SPDX-License-Identifier: Apache-2.0
//
// The messages of AttendChunked. Their few fields are parsed by hand, in any order; a chunk's bytes
// stay where they are. Pure; thread-safe.

#pragma once

#include <google/protobuf/arena.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/util/message.h"
#include "server/wire/message_slices.h"
#include "server/wire/request_codec.h"

namespace attend {

// Most bytes of data in one message from a client, and of a header. Peers receive messages of 4 MiB
// by default; a chunk of that size with its fields is a little more.
inline constexpr int64_t kChunkBytesMax = int64_t{4} << 20;
// The same if the size of messages is bounded.
constexpr int64_t ChunkBytesMax(int64_t message_bytes_max) {
  return std::min(kChunkBytesMax, message_bytes_max);
}
// Most bytes of a message around its data.
inline constexpr int64_t kChunkMarginBytes = 1024;

// A stream's first message: a token, or a decoded header.
class FirstMessage {
 public:
  // INVALID_ARGUMENT if there are more than `bytes_max` bytes, or this is not a valid first
  // message.
  Status Parse(InMessage&& message, int64_t bytes_max);

  int64_t message_bytes() const { return message_bytes_; }
  bool has_token() const { return has_token_; }
  // A token that is too long is cut to a length that is still invalid.
  const std::string& token() const { return token_; }
  const RequestMessage& header() const { return header_; }

 private:
  Status ParseFields();
  Status ParseHeader();

  int64_t message_bytes_ = 0;
  MessageSlices slices_;
  std::vector<ByteSpan> header_slices_;
  google::protobuf::Arena arena_;
  RequestMessage header_;
  bool has_token_ = false;
  std::string token_;
};

// Any later message, a chunk: its few fields, in any order, and its bytes where they are.
class ChunkMessage {
 public:
  // INVALID_ARGUMENT if there are more than `bytes_max` bytes.
  Status Take(InMessage&& message, int64_t bytes_max);
  // INVALID_ARGUMENT if it is not a chunk or has more than `bytes_max` of data.
  Status ParseChunk(int64_t bytes_max);

  int64_t message_bytes() const { return slices_.bytes(); }
  // The chunk's fields.
  int tensor() const { return tensor_; }
  uint64_t offset() const { return offset_; }
  int64_t bytes() const { return bytes_; }
  // Copies what is lent, so that it stays.
  void Own() { slices_.Own(); }
  // The chunk's data as pieces of a copy to `to`; valid while this object lives.
  std::vector<HostPiece> Pieces(void* to) const;

 private:
  MessageSlices slices_;
  int tensor_ = 0;
  uint64_t offset_ = 0;
  int64_t data_at_ = 0;  // in the message
  int64_t bytes_ = 0;
};

OutMessage EncodeGrant(const std::string& token, int64_t streams_max, int64_t chunk_bytes_max,
                       int64_t idle_timeout_ms);
// Encodes the answer's small fields, which it takes.
OutMessage EncodeChunkedHeader(v1::AttendResponse* response);
// A chunk of the bytes in `data`, which are not copied.
OutMessage EncodeChunk(v1::TensorName tensor, int64_t offset, MessagePiece data);

}  // namespace attend
