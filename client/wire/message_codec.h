// SPDX-License-Identifier: Apache-2.0
//
// AttendRequest and AttendResponse between the caller's memory and gRPC's buffers, without copying
// tensor bytes on the way out and with one copy on the way in. The bytes are exactly those that the
// generated classes write. Used by client.cc and stream.cc; free of threads.

#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "client/call/attention_call.h"
#include "client/call/call_options.h"

namespace attend::client {

// Where one message ends and chunks begin, by bytes.
struct MessageBounds {
  int64_t chunked_bytes_min = kChunkedBytesMin;  // in chunks by itself from here on
  int64_t message_bytes_max = 0;  // of a message or its answer, as the server bounds it; 0: unknown
};

class ChunkedCall;

// What an answer has. Bytes are null if the call's shapes do not fit together, the server shall say
// so, or it has no v, whose dim is O's.
struct AnswerSize {
  v1::TensorName name = v1::TENSOR_NAME_UNSPECIFIED;
  std::optional<int64_t> bytes;
};
using AnswerSizes = std::vector<AnswerSize>;

// A request ready to be sent any number of times: the request_id apart, it is a list of
// reference-counted slices, so that sending it again costs neither serialisation nor memory.
class EncodedCall {
 public:
  // Every payload slice holds its tensor's owner and `keep_alive` until gRPC lets go of the last
  // byte, which may be after the call has ended; borrowed_slice.h says on which thread.
  static Result<EncodedCall> Make(const AttentionCall& call,
                                  std::shared_ptr<const void> keep_alive = nullptr);
  // The same, to be sent in chunks.
  static Result<EncodedCall> MakeChunked(const AttentionCall& call,
                                         std::shared_ptr<const void> keep_alive = nullptr);

  // Null if it is sent as one message.
  const std::shared_ptr<const ChunkedCall>& chunked() const { return chunked_; }
  // The same call as one message, for a server that takes no chunks. Null if there is no choice:
  // chunks were asked for, or no message holds it.
  const std::shared_ptr<const EncodedCall>& as_message() const { return as_message_; }
  // The whole message, if it is one. An id of up to 21 bytes needs no memory of its own.
  grpc::ByteBuffer ToByteBuffer(std::string_view request_id) const;

  // The same message with the answer's tensors elsewhere; of calls that have no places for them.
  std::shared_ptr<const EncodedCall> WithOutputs(const SharedOutputs& outputs) const;
  const SharedOutputs& outputs() const { return outputs_; }
  // Whether a tensor of it or of its answer is in shared memory.
  bool uses_shared_memory() const { return !regions_.empty() || outputs_.any(); }
  // Whether it asks for gradients.
  bool backward() const { return backward_; }

  // Bytes of all tensors, including those in shared memory.
  int64_t payload_bytes() const { return payload_bytes_; }
  // INTERNAL if an answer's tensors are not those that were asked for, by their sizes where these
  // are known. Of one message.
  Status CheckAnswer(const AttentionResult& result) const;
  // INVALID_ARGUMENT if this is one message and it or its answer has more than `bytes_max` bytes;
  // 0: no bound is known.
  Status CheckMessageBytes(int64_t bytes_max) const;
  // Whether every tensor that is sent in place has an owner, which asynchronous calls require.
  bool owned() const { return owned_; }

 private:
  std::vector<grpc::Slice> slices_;
  friend Result<EncodedCall> EncodeCall(const AttentionCall& call, CallTransport transport,
                                        const MessageBounds& bounds,
                                        std::shared_ptr<const void> keep_alive);

  std::shared_ptr<const ChunkedCall> chunked_;
  std::shared_ptr<const EncodedCall> as_message_;
  SharedOutputs outputs_;
  std::vector<std::shared_ptr<const void>> regions_;  // kept while the call is
  int64_t payload_bytes_ = 0;
  int64_t message_bytes_ = 0;  // without request_id
  int64_t answer_bytes_ = 0;   // of the answer's tensors, if they come in one message
  AnswerSizes sizes_;
  bool owned_ = false;
  bool backward_ = false;
};

// Encodes the call for `transport`, in one message if any of its tensors is in shared memory. kAuto
// uses chunks, with as_message() to fall back on, if the tensors, O included, have at least
// `chunked_bytes_min` bytes or one message cannot hold the call, and if the server accepts a header
// that long. Chunks need v, whose dim says how large O is; without it there is one message.
// INVALID_ARGUMENT for a message beyond the bounds.
Result<EncodedCall> EncodeCall(const AttentionCall& call, CallTransport transport,
                               const MessageBounds& bounds,
                               std::shared_ptr<const void> keep_alive = nullptr);

struct DecodedResponse {
  AttentionResult result;
  int64_t payload_bytes = 0;   // of its tensors, copied or not
  bool has_status = false;     // streams: the request failed alone
  Status status;               // that failure
  int64_t retry_after_ms = 0;  // with it; 0 = none given
};

// The places that the call with this request_id has for its answer.
using FindOutputs = std::function<SharedOutputs(const std::string& request_id)>;

// Takes the buffer apart and clears it. Tensor bytes must match the declared shapes. With kDiscard
// tensors have their dtype and shape but no data. What the server wrote to shared memory must
// be in its call's place, and refers to it (what it wrote to a device's is copied from there); only
// then `find_outputs` is asked.
Result<DecodedResponse> DecodeResponse(grpc::ByteBuffer* buffer, Payload payload,
                                       const FindOutputs& find_outputs = nullptr);

// All of an answer but its tensors.
void TakeSmallFields(v1::AttendResponse* message, AttentionResult* result);

AnswerSizes SizesOf(const AttentionCall& call);
// The answer's tensor of that name; null if it has none.
const v1::Tensor* TensorOf(const v1::AttendResponse& response, v1::TensorName name);
// The names that answers may have, in the order of their raw entries.
inline constexpr std::array<v1::TensorName, kAnswerTensorsMax> kAnswerNames = {
    v1::TENSOR_NAME_O,   v1::TENSOR_NAME_LSE,    v1::TENSOR_NAME_D_Q,    v1::TENSOR_NAME_D_K,
    v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_BIAS, v1::TENSOR_NAME_D_SINKS};
// The small fields of `call` (no request_id, no raw) as a message.
v1::AttendRequest RequestHeader(const AttentionCall& call);
void FillOutputs(const SharedOutputs& from, v1::AttendRequest* to);
// Whether a tensor of the call or of its answer is in shared memory.
bool UsesSharedMemory(const AttentionCall& call);

// The reverse, for requests read from disk: tensors refer to `request`'s raw, which they keep.
Result<AttentionCall> CallFromRequest(std::shared_ptr<const v1::AttendRequest> request);

}  // namespace attend::client
