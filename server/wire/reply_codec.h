// SPDX-License-Identifier: Apache-2.0
//
// Encodes an AttendResponse. Large tensors are not copied: the transport sends from the request's
// output block, which returns to its pool, on any thread, when the last byte has left.

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

namespace attend {

// A tensor of an answer.
struct RawTensor {
  const void* data = nullptr;
  int64_t bytes = 0;
};

// The parts of an answer's message.
struct AnswerParts {
  const google::protobuf::MessageLite& fields;  // everything but the tensors and the text
  uint64_t raw_tag = 0;                         // tag of each tensor's bytes
  std::span<const RawTensor> tensors;
  uint64_t outer_tag = 0;      // the answer is this field of an outer message; 0: no outer message
  uint64_t text_tag = 0;       // tag of a text that would need an allocation in `fields`
  std::string_view text = {};  // empty: none
};
// Small tensors are copied; large ones are sent from `block`.
OutMessage AssembleAnswer(const AnswerParts& parts, HostBlock block);

// Fills in the small fields of a successful answer, except kernel_reason; `raw` stays empty.
void FillResponse(const Request& request, int64_t total_ns, v1::AttendResponse* response);
// The field of the message for a tensor of the answer.
v1::Tensor& ResponseTensor(v1::AttendResponse& response, Output output);
// Fills in dtype, shape (one dimension or more) and byte length.
void FillTensor(DType dtype, std::initializer_list<int64_t> shape, v1::Tensor* tensor);
// The same for an output of the request.
void FillOutput(const Request& request, Output output, v1::Tensor* tensor);
// Takes the request, whose status is OK.
OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns);

// A stream's answer to a failed request.
OutMessage EncodeFailure(const std::string& request_id, const Status& status,
                         const CacheRefusal& refusal, int64_t retry_after_ms);
void FillRefusal(const CacheRefusal& refusal, v1::RequestStatus& status);

}  // namespace attend
