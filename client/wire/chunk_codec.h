// SPDX-License-Identifier: Apache-2.0
//
// Messages of AttendChunked between the caller's memory and gRPC's buffers: outgoing bytes are not
// copied, incoming ones once, into their final place.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/call/attention_call.h"
#include "client/wire/message_codec.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// The largest header, without its request_id, that every server accepts: 4 MiB less a margin.
inline constexpr int64_t kChunkedHeaderBytesMax = (int64_t{4} << 20) - (int64_t{4} << 10);

// A call ready to be sent in chunks any number of times. Immutable.
class ChunkedCall {
 public:
  // As EncodedCall::Make.
  static Result<ChunkedCall> Make(const AttentionCall& call,
                                  std::shared_ptr<const void> keep_alive);

  // Bytes of one chunk: large enough to hide the overhead, small enough to spread over streams.
  static constexpr int64_t kPieceBytes = int64_t{2} << 20;
  struct Piece {
    size_t tensor = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  grpc::ByteBuffer Header(std::string_view request_id) const;
  // Advances `piece` to the bytes after it, at most `bytes_max` > 0 of them: tensor by tensor,
  // starting from Piece(). False if there are none.
  bool Next(int64_t bytes_max, Piece* piece) const;
  // The slice holds the same references as EncodedCall's slices.
  grpc::ByteBuffer Chunk(const Piece& piece) const;

  int64_t payload_bytes() const { return payload_bytes_; }
  int64_t answer_bytes() const { return answer_bytes_; }  // of O, or of the gradients
  // The tensors that its answer must have.
  const std::vector<AnswerTensor>& answer() const { return answer_; }
  bool backward() const { return header_.has_backward(); }
  int64_t header_bytes() const { return header_bytes_; }  // without request_id
  bool owned() const { return owned_; }

 private:
  v1::AttendRequest header_;
  std::vector<std::pair<v1::TensorName, TensorRef>> tensors_;
  std::shared_ptr<const void> keep_alive_;
  int64_t payload_bytes_ = 0;
  int64_t answer_bytes_ = 0;
  int64_t header_bytes_ = 0;
  std::vector<AnswerTensor> answer_;
  bool owned_ = false;
};

// The first message of a further stream.
grpc::ByteBuffer TokenMessage(const std::string& token);

// The set of bytes of a tensor that have arrived.
class ByteRanges {
 public:
  // False, without effect, if one of the bytes has arrived before. begin + bytes must fit an int64.
  bool Add(int64_t begin, int64_t bytes);

 private:
  std::map<int64_t, int64_t> ends_;  // end by begin; disjoint, adjacent ranges merged
};

// One answer, assembled from the messages of all its streams. The call determines its tensors, so
// chunks may precede the header; memory is allocated with the first chunk or the header.
// Thread-safe; copies run in parallel.
class ChunkedAnswer {
 public:
  ChunkedAnswer(std::shared_ptr<const ChunkedCall> call, Payload payload)
      : call_(std::move(call)), payload_(payload) {}

  // Takes one message and clears it; a grant goes to `grant`. INTERNAL: it is malformed.
  Status Take(grpc::ByteBuffer* message, std::optional<v1::ChunkedGrant>* grant);
  // The header and every byte have arrived.
  bool complete() const;
  // To be called once, when complete().
  DecodedResponse TakeResponse();

 private:
  Status TakeFields(grpc::ByteBuffer* message, std::optional<v1::ChunkedGrant>* grant);
  Status TakeHeader(v1::AttendResponse* response);
  Status TakeChunk(grpc::ByteBuffer* message, int tensor, uint64_t offset, int64_t bytes);

  Status MakeTensors() ATTEND_REQUIRES(mutex_);  // unless made_
  // Claims these bytes for one caller and returns their place; null if they are discarded.
  Result<std::byte*> Reserve(int tensor, uint64_t offset, int64_t bytes) ATTEND_REQUIRES(mutex_);

  const std::shared_ptr<const ChunkedCall> call_;
  const Payload payload_;
  mutable Mutex mutex_;
  bool header_ ATTEND_GUARDED_BY(mutex_) = false;
  bool made_ ATTEND_GUARDED_BY(mutex_) = false;  // the response's tensors
  DecodedResponse response_ ATTEND_GUARDED_BY(mutex_);
  // One per tensor of the call's answer.
  std::array<ByteRanges, kAnswerTensorsMax> came_ ATTEND_GUARDED_BY(mutex_);
  int64_t missing_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;  // valid once made_
};

}  // namespace attend::client
