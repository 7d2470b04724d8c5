// SPDX-License-Identifier: Apache-2.0
//
// AttendRequest and AttendResponse between the caller's memory and gRPC's buffers: tensor bytes are
// not copied on the way out, and once on the way in. The bytes are exactly those that the generated
// classes write. No threads.

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

// Sizes that decide between one message and chunks.
struct MessageBounds {
  int64_t chunked_bytes_min = kChunkedBytesMin;  // from here on kAuto uses chunks
  int64_t message_bytes_max = 0;  // server's bound on a message and its answer; 0: unknown
};

class ChunkedCall;

// A tensor that the answer must have. `bytes` is null if the call's shapes do not fit together (the
// server will say so), or if it has no v, whose dim is O's.
struct AnswerSize {
  v1::TensorName name = v1::TENSOR_NAME_UNSPECIFIED;
  std::optional<int64_t> bytes;
};
using AnswerSizes = std::vector<AnswerSize>;

// A request ready to be sent any number of times: apart from the request_id, a list of
// reference-counted slices, so that resending costs neither serialisation nor memory.
class EncodedCall {
 public:
  // Every payload slice holds its tensor's owner and `keep_alive` until gRPC has released the last
  // byte, which may be after the call has ended; borrowed_slice.h says on which thread.
  static Result<EncodedCall> Make(const AttentionCall& call,
                                  std::shared_ptr<const void> keep_alive = nullptr);
  // The same in chunks.
  static Result<EncodedCall> MakeChunked(const AttentionCall& call,
                                         std::shared_ptr<const void> keep_alive = nullptr);

  // Null if it is one message.
  const std::shared_ptr<const ChunkedCall>& chunked() const { return chunked_; }
  // The same call as one message, for a server without AttendChunked. Null if chunks were
  // requested, or if one message cannot hold the call.
  const std::shared_ptr<const EncodedCall>& as_message() const { return as_message_; }
  // The whole message, of a call that is one. Ids of up to 21 bytes need no allocation.
  grpc::ByteBuffer ToByteBuffer(std::string_view request_id) const;

  // The same message with places for the answer's tensors, for a call that has none yet.
  std::shared_ptr<const EncodedCall> WithOutputs(const SharedOutputs& outputs) const;
  const SharedOutputs& outputs() const { return outputs_; }
  // Whether a tensor of the call or its answer is in shared memory.
  bool uses_shared_memory() const { return !regions_.empty() || outputs_.any(); }
  // Whether it asks for gradients.
  bool backward() const { return backward_; }

  // Bytes of all tensors, including those in shared memory.
  int64_t payload_bytes() const { return payload_bytes_; }
  // INTERNAL: the answer's tensors are not the requested ones, judged by size where that is known.
  // For calls that are one message.
  Status CheckAnswer(const AttentionResult& result) const;
  // INVALID_ARGUMENT: this is one message, and it or its answer has more than `bytes_max` bytes; 0:
  // no known bound.
  Status CheckMessageBytes(int64_t bytes_max) const;
  // Whether every tensor sent without a copy has an owner, as asynchronous calls require.
  bool owned() const { return owned_; }

 private:
  std::vector<grpc::Slice> slices_;
  friend Result<EncodedCall> EncodeCall(const AttentionCall& call, CallTransport transport,
                                        const MessageBounds& bounds,
                                        std::shared_ptr<const void> keep_alive);

  std::shared_ptr<const ChunkedCall> chunked_;
  std::shared_ptr<const EncodedCall> as_message_;
  SharedOutputs outputs_;
  std::vector<std::shared_ptr<const void>> regions_;  // kept alive with the call
  int64_t payload_bytes_ = 0;
  int64_t message_bytes_ = 0;  // without request_id
  int64_t answer_bytes_ = 0;   // of the answer's tensors, if they come in one message
  AnswerSizes sizes_;
  bool owned_ = false;
  bool backward_ = false;
};

// Encodes the call for `transport`; as one message if any of its tensors is in shared memory. kAuto
// uses chunks, with as_message() as the fallback, if the tensors, O included, have at least
// `chunked_bytes_min` bytes or one message cannot hold the call, and if the server accepts a header
// of that size. Chunks need v, whose dim determines O's size; a call without it is one message.
// INVALID_ARGUMENT: a message beyond the bounds.
Result<EncodedCall> EncodeCall(const AttentionCall& call, CallTransport transport,
                               const MessageBounds& bounds,
                               std::shared_ptr<const void> keep_alive = nullptr);

struct DecodedResponse {
  AttentionResult result;
  int64_t payload_bytes = 0;   // of its tensors, copied or not
  bool has_status = false;     // streams: this request failed
  Status status;               // its failure
  int64_t retry_after_ms = 0;  // with a failure; 0: none given
};

// The places for the answer of the call with this request_id.
using FindOutputs = std::function<SharedOutputs(const std::string& request_id)>;

// Decodes the buffer and clears it. Tensor bytes must match the declared shapes. With kDiscard,
// tensors have dtype and shape but no data. A tensor in shared memory must be in its call's place:
// host memory is referred to, device memory copied. `find_outputs` is called only if there is such
// a tensor.
Result<DecodedResponse> DecodeResponse(grpc::ByteBuffer* buffer, Payload payload,
                                       const FindOutputs& find_outputs = nullptr);

// Takes all of an answer but its tensors.
void TakeSmallFields(v1::AttendResponse* message, AttentionResult* result);

AnswerSizes SizesOf(const AttentionCall& call);
// The answer's tensor of that name; null if it has none.
const v1::Tensor* TensorOf(const v1::AttendResponse& response, v1::TensorName name);
// The tensors that answers may have, in the order of their raw entries.
inline constexpr std::array<v1::TensorName, kAnswerTensorsMax> kAnswerNames = {
    v1::TENSOR_NAME_O,   v1::TENSOR_NAME_LSE,    v1::TENSOR_NAME_D_Q,    v1::TENSOR_NAME_D_K,
    v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_BIAS, v1::TENSOR_NAME_D_SINKS};
// Text must be UTF-8: the generated classes of other programs cannot read other bytes.
Status CheckUtf8(const std::string& field, const std::string& text);
// That of `call`.
Status CheckText(const AttentionCall& call);
// The small fields of `call` (no request_id, no raw) as a message.
v1::AttendRequest RequestHeader(const AttentionCall& call);
// The reverse, without tensors, sessions and places: request_id, the options, and which gradients
// to compute.
void TakeOptions(const v1::AttendRequest& message, AttentionCall* call);
void FillOutputs(const SharedOutputs& from, v1::AttendRequest* to);
// Whether a tensor of the call or its answer is in shared memory.
bool UsesSharedMemory(const AttentionCall& call);

// A request read from disk as a call: tensors refer to the raw bytes of `request` and keep it
// alive.
Result<AttentionCall> CallFromRequest(std::shared_ptr<const v1::AttendRequest> request);

}  // namespace attend::client
