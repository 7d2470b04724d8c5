// SPDX-License-Identifier: Apache-2.0
//
// AttendRequest and AttendResponse between the caller's memory and gRPC's buffers, without copying
// tensor bytes on the way out and with one copy on the way in. The bytes are exactly those that the
// generated classes write. Used by client.cc and stream.cc; free of threads.

#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <string>
#include <vector>

#include "client/attention_call.h"

namespace attend::client {

// A request ready to be sent any number of times: the request_id apart, it is a list of
// reference-counted slices, so that sending it again costs neither serialisation nor memory.
class EncodedCall {
 public:
  // Every payload slice holds its tensor's owner and `keep_alive`; both are dropped on whatever
  // thread gRPC lets go of the last byte, which may be after the call has ended.
  static Result<EncodedCall> Make(const AttentionCall& call,
                                  std::shared_ptr<const void> keep_alive = nullptr);

  // The whole message. An id of up to 21 bytes needs no memory of its own.
  grpc::ByteBuffer ToByteBuffer(std::string_view request_id) const;

  int64_t payload_bytes() const { return payload_bytes_; }
  // Whether every tensor that is sent from where it lies has an owner, which the asynchronous
  // calls demand.
  bool owned() const { return owned_; }

 private:
  std::vector<grpc::Slice> slices_;
  int64_t payload_bytes_ = 0;
  bool owned_ = false;
};

// What of an answer is copied out.
enum class Payload { kCopy, kDiscard };

struct DecodedResponse {
  AttentionResult result;
  int64_t payload_bytes = 0;   // of o and lse, copied or not
  bool has_status = false;     // streams: the request failed alone
  Status status;               // that failure
  int64_t retry_after_ms = 0;  // with it; 0 = none given
};

// Takes the buffer apart and clears it. Tensor bytes must match the declared shapes. With kDiscard
// `o` and `lse` have their dtype and shape but no data.
Result<DecodedResponse> DecodeResponse(grpc::ByteBuffer* buffer, Payload payload);

// The small fields of `call` (no request_id, no raw) as a message.
v1::AttendRequest RequestHeader(const AttentionCall& call);

// The reverse, for requests read from disk: tensors refer to `request`'s raw, which they keep.
Result<AttentionCall> CallFromRequest(std::shared_ptr<const v1::AttendRequest> request);

}  // namespace attend::client
