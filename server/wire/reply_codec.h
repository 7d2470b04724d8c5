// SPDX-License-Identifier: Apache-2.0
//
// Encodes an AttendResponse. Large tensors are not copied: the transport sends from the request's
// output block, which returns to its pool when the last byte has left, on any thread.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/util/message.h"
#include "server/wire/answer_watch.h"

namespace attend {

// One tensor of an answer.
struct RawTensor {
  const void* data = nullptr;
  int64_t bytes = 0;
};

// What an answer's message has.
struct AnswerParts {
  const google::protobuf::MessageLite& fields;  // all else
  uint64_t raw_tag = 0;                         // of each tensor's bytes, which follow
  std::span<const RawTensor> tensors;
  uint64_t outer_tag = 0;      // the answer is this field of another message; 0: it is the message
  uint64_t text_tag = 0;       // of a text too long to be put into a message without an allocation
  std::string_view text = {};  // empty: there is none
};
// Small tensors are copied; large ones are sent from `block`. `call` is told how much of those was
// taken.
OutMessage AssembleAnswer(const AnswerParts& parts, HostBlock block, WatchedRef call);

// Fills in the small fields of a successful answer, but for kernel_reason; `raw` stays empty.
void FillResponse(const Request& request, int64_t total_ns, v1::AttendResponse* response);
// The message's field for a tensor of the answer.
v1::Tensor& ResponseTensor(v1::AttendResponse& response, Output output);
// Fills in dtype, shape, of one dimension or more, and byte length.
void FillTensor(DType dtype, std::initializer_list<int64_t> shape, v1::Tensor* tensor);
// The same for a tensor in the layout; `rows` are those of all sequences if it is packed.
void FillTensor(DType dtype, Layout layout, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
                v1::Tensor* tensor);

// Takes the request, whose status is OK. `call` is told how much of a large answer was taken.
OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns, WatchedRef call);

// A stream's answer to a failed request.
OutMessage EncodeFailure(const std::string& request_id, const Status& status,
                         const CacheRefusal& refusal, int64_t retry_after_ms);
void FillRefusal(const CacheRefusal& refusal, v1::RequestStatus& status);

}  // namespace attend
