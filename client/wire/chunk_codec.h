// SPDX-License-Identifier: Apache-2.0
//
// The messages of AttendChunked between the caller's memory and gRPC's buffers: nothing is copied
// on the way out, and each byte of an answer once, to its final place.

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

// Bytes of a header, without its request_id, that every server takes: the bound is 4 MiB.
inline constexpr int64_t kChunkedHeaderBytesMax = (int64_t{4} << 20) - (int64_t{4} << 10);

// A call ready to be sent in chunks any number of times. Immutable.
class ChunkedCall {
 public:
  // As EncodedCall::Make.
  static Result<ChunkedCall> Make(const AttentionCall& call,
                                  std::shared_ptr<const void> keep_alive);

  // Bytes of one chunk: enough that the overhead does not matter, few enough to spread out.
  static constexpr int64_t kPieceBytes = int64_t{2} << 20;
  struct Piece {
    size_t tensor = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  grpc::ByteBuffer Header(std::string_view request_id) const;
  // Moves `piece` to the bytes after it, at most `bytes_max` > 0 of them: tensor after tensor, from
  // Piece() on. False if there are none.
  bool Next(int64_t bytes_max, Piece* piece) const;
  // The slice holds what EncodedCall's hold.
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

// A further stream's first message.
grpc::ByteBuffer TokenMessage(const std::string& token);

// Which bytes of a tensor have come.
class ByteRanges {
 public:
  // False, and nothing changes, if one of these bytes has come before. The sum fits an int64.
  bool Add(int64_t begin, int64_t bytes);

 private:
  std::map<int64_t, int64_t> ends_;  // by begin; disjoint, and none begins where another ends
};

// One answer, from the messages of all its streams. What it must be the call says, so chunks that
// come before the header have their place too; there is memory for it from the first of them on, or
// the header. Thread-safe; bytes are copied in parallel.
class ChunkedAnswer {
 public:
  ChunkedAnswer(std::shared_ptr<const ChunkedCall> call, Payload payload)
      : call_(std::move(call)), payload_(payload) {}

  // Takes a message apart and clears it; a grant goes to `grant`. INTERNAL if it makes no sense.
  Status Take(grpc::ByteBuffer* message, std::optional<v1::ChunkedGrant>* grant);
  // Header and every byte have come.
  bool complete() const;
  // Once complete, and once.
  DecodedResponse TakeResponse();

 private:
  Status TakeFields(grpc::ByteBuffer* message, std::optional<v1::ChunkedGrant>* grant);
  Status TakeHeader(v1::AttendResponse* response);
  Status TakeChunk(grpc::ByteBuffer* message, int tensor, uint64_t offset, int64_t bytes);

  Status MakeTensors() ATTEND_REQUIRES(mutex_);  // if they are not there
  // The place of these bytes, which no other caller gets; null if they are dropped.
  Result<std::byte*> Reserve(int tensor, uint64_t offset, int64_t bytes) ATTEND_REQUIRES(mutex_);

  const std::shared_ptr<const ChunkedCall> call_;
  const Payload payload_;
  mutable Mutex mutex_;
  bool header_ ATTEND_GUARDED_BY(mutex_) = false;
  bool made_ ATTEND_GUARDED_BY(mutex_) = false;  // the response's tensors
  DecodedResponse response_ ATTEND_GUARDED_BY(mutex_);
  // For each tensor of the call's answer.
  std::array<ByteRanges, kAnswerTensorsMax> came_ ATTEND_GUARDED_BY(mutex_);
  int64_t missing_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;  // once the tensors are made
};

}  // namespace attend::client
