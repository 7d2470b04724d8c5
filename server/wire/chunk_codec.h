// SPDX-License-Identifier: Apache-2.0
//
// The messages of AttendChunked. Their few fields are parsed by hand, in any order; chunk data
// stays in place. Pure; thread-safe.

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

// Maximum size of the data in a client's message, and of a header. Peers accept messages of 4 MiB
// by default; a chunk of that size is slightly larger with its fields.
inline constexpr int64_t kChunkBytesMax = int64_t{4} << 20;
// The same under a bound on message sizes.
constexpr int64_t ChunkBytesMax(int64_t message_bytes_max) {
  return std::min(kChunkBytesMax, message_bytes_max);
}
// Maximum size of a message's other fields.
inline constexpr int64_t kChunkMarginBytes = 1024;

// The first message of a stream: a token, or a decoded header.
class FirstMessage {
 public:
  // INVALID_ARGUMENT: more than `bytes_max` bytes, or not a valid first message.
  Status Parse(InMessage&& message, int64_t bytes_max);

  int64_t message_bytes() const { return message_bytes_; }
  bool has_token() const { return has_token_; }
  // A token that is too long is truncated to a length that is still invalid.
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

// Any later message of a stream: a chunk's fields, in any order, and its data in place.
class ChunkMessage {
 public:
  // INVALID_ARGUMENT if it has more than `bytes_max` bytes.
  Status Take(InMessage&& message, int64_t bytes_max);
  // INVALID_ARGUMENT if it is not a chunk or has more than `bytes_max` bytes of data.
  Status ParseChunk(int64_t bytes_max);

  int64_t message_bytes() const { return slices_.bytes(); }
  // The chunk's fields.
  int tensor() const { return tensor_; }
  uint64_t offset() const { return offset_; }
  int64_t bytes() const { return bytes_; }
  // Copies borrowed bytes, so that they outlive the caller's buffer.
  void Own() { slices_.Own(); }
  // The chunk's data as the pieces of a copy to `to`; valid while this object lives.
  std::vector<HostPiece> Pieces(void* to) const;

 private:
  MessageSlices slices_;
  int tensor_ = 0;
  uint64_t offset_ = 0;
  int64_t data_at_ = 0;  // position in the message
  int64_t bytes_ = 0;
};

OutMessage EncodeGrant(const std::string& token, int64_t streams_max, int64_t chunk_bytes_max,
                       int64_t idle_timeout_ms);
// Encodes the small fields of the answer and clears `response`.
OutMessage EncodeChunkedHeader(v1::AttendResponse* response);
// A chunk with the bytes in `data`, which are not copied.
OutMessage EncodeChunk(v1::TensorName tensor, int64_t offset, MessagePiece data);

}  // namespace attend
