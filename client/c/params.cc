// SPDX-License-Identifier: Apache-2.0

#include "client/c/params.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/reflection.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

#include "client/c/status.h"
#include "client/wire/message_codec.h"

namespace attend::client::c {
namespace {

using google::protobuf::FieldDescriptor;

constexpr int32_t kDimsMax = std::size(decltype(attend_client_tensor::shape){});

Status CheckRange(const std::string& field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(field + " is " + std::to_string(value) + ", must be in [" +
                         std::to_string(low) + ", " + std::to_string(high) + "]");
}

Status ReadTensor(const std::string& name, const attend_client_tensor& from,
                  const std::shared_ptr<const void>& owner, TensorRef* to) {
  ATTEND_RETURN_IF_ERROR(
      CheckRange(name + ".dtype", from.dtype, ATTEND_CLIENT_FLOAT16, ATTEND_CLIENT_BIT));
  ATTEND_RETURN_IF_ERROR(CheckRange(name + ".dims", from.dims, 1, kDimsMax));
  ATTEND_RETURN_IF_ERROR(CheckRange(name + ".memory", from.memory, 0, INT32_MAX));
  const auto dtype = static_cast<DType>(from.dtype);
  std::vector<int64_t> shape(from.shape, from.shape + from.dims);
  const Result<int64_t> bytes = TensorBytes(name, dtype, shape);
  if (!bytes.ok()) return bytes.status();
  if (*bytes > 0) ATTEND_RETURN_IF_ERROR(NotNull((name + ".data").c_str(), from.data));
  *to = TensorRef(dtype, std::move(shape), from.data, *bytes);
  to->owner = owner;
  return Status();
}

// As above, for an optional tensor.
Status ReadTensor(const std::string& name, const attend_client_tensor& from,
                  const std::shared_ptr<const void>& owner, std::optional<TensorRef>* to) {
  if (from.dtype == 0) return Status();
  return ReadTensor(name, from, owner, &to->emplace());
}

// Refuses what does not come as text: tensors, their places and sessions.
Status CheckOptions(const google::protobuf::Message& message) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* const field : fields) {
    const auto* const type = field->message_type();
    const bool option =
        type == nullptr ? field->type() != FieldDescriptor::TYPE_BYTES
                        : type == v1::Mask::descriptor() || type == v1::BackwardPass::descriptor();
    if (!option || field->name() == "tree_tokens") {
      return InvalidArgument("request has " + field->name() + ", which does not come as text");
    }
  }
  return Status();
}

template <class Number>
void Assign(const attend_client_list& list, google::protobuf::MutableRepeatedFieldRef<Number> to) {
  to.Clear();
  for (int64_t n = 0; n < list.count; ++n) to.Add(static_cast<const Number*>(list.data)[n]);
}

Status ReadList(const attend_client_list& list, v1::AttendRequest* request) {
  ATTEND_RETURN_IF_ERROR(NotNull("lists.name", list.name));
  ATTEND_RETURN_IF_ERROR(CheckRange(std::string(list.name) + ".count", list.count, 0, INT32_MAX));
  if (list.count > 0) ATTEND_RETURN_IF_ERROR(NotNull(list.name, list.data));
  const auto* const field = v1::AttendRequest::descriptor()->FindFieldByName(list.name);
  const auto& reflection = *v1::AttendRequest::GetReflection();
  const bool is_list = field != nullptr && field->is_repeated();
  if (is_list && field->type() == FieldDescriptor::TYPE_INT64) {
    Assign(list, reflection.GetMutableRepeatedFieldRef<int64_t>(request, field));
  } else if (is_list && field->type() == FieldDescriptor::TYPE_FLOAT) {
    Assign(list, reflection.GetMutableRepeatedFieldRef<float>(request, field));
  } else {
    return InvalidArgument("lists has \"" + std::string(list.name) +
                           "\", must be a list of numbers of AttendRequest");
  }
  return Status();
}

// Keeps the parser's first complaint.
class Complaint : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (!text_.empty()) return;
    text_ =
        "request:" + std::to_string(line + 1) + ":" + std::to_string(column + 1) + ": " + message;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Parsing takes a quarter of a small call's start, and programs repeat a few texts: those are kept.
Status ReadText(const std::string& text, v1::AttendRequest* request) {
  constexpr size_t kTextsMax = 32, kCharactersMax = 1024;
  thread_local std::unordered_map<std::string, v1::AttendRequest> known;
  if (const auto found = known.find(text); found != known.end()) {
    *request = found->second;
    return Status();
  }
  Complaint complaint;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&complaint);
  if (!parser.ParseFromString(text, request)) return InvalidArgument(complaint.text());
  ATTEND_RETURN_IF_ERROR(CheckOptions(*request));
  ATTEND_RETURN_IF_ERROR(CheckOptions(request->backward()));
  if (known.size() >= kTextsMax) known.clear();
  if (text.size() <= kCharactersMax) known[text] = *request;
  return Status();
}

// The options, with `backward` set if gradients are asked for.
Status ReadRequest(const attend_client_params& params, AttentionCall* call) {
  ATTEND_RETURN_IF_ERROR(CheckRange("lists_count", params.lists_count, 0, INT32_MAX));
  if (params.request == nullptr && params.lists_count == 0) return Status();
  v1::AttendRequest request;
  if (params.request != nullptr) {
    ATTEND_RETURN_IF_ERROR(ReadText(params.request, &request));
  }
  if (params.lists_count > 0) ATTEND_RETURN_IF_ERROR(NotNull("lists", params.lists));
  for (int64_t n = 0; n < params.lists_count; ++n) {
    ATTEND_RETURN_IF_ERROR(ReadList(params.lists[n], &request));
  }
  for (const int wanted : request.backward().wanted()) {
    ATTEND_RETURN_IF_ERROR(CheckRange("request.backward.wanted", wanted, v1::TENSOR_NAME_D_Q,
                                      v1::TENSOR_NAME_D_SINKS));
  }
  const int o_dtype = request.o_dtype();
  if (o_dtype != v1::DTYPE_UNSPECIFIED && o_dtype != v1::DTYPE_FLOAT32 &&
      o_dtype != params.q.dtype) {
    return InvalidArgument("request.o_dtype is " + std::to_string(o_dtype) + ", must be q.dtype (" +
                           std::to_string(params.q.dtype) + ") or FLOAT32 (3)");
  }
  TakeOptions(request, call);
  return Status();
}

// Checks only what the message cannot express; the server checks the rest.
Status ReadTree(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                AttentionCall* call) {
  ATTEND_RETURN_IF_ERROR(ReadTensor("tree", params.tree, owner, &call->tree));
  if (!call->tree) return Status();
  ATTEND_RETURN_IF_ERROR(
      CheckRange("tree.dtype", params.tree.dtype, ATTEND_CLIENT_BIT, ATTEND_CLIENT_BIT));
  ATTEND_RETURN_IF_ERROR(CheckRange("tree.dims", params.tree.dims, 3, 3));
  ATTEND_RETURN_IF_ERROR(CheckRange("tree.shape[1]", params.tree.shape[1], params.tree.shape[2],
                                    params.tree.shape[2]));
  return CheckRange("tree.memory", params.tree.memory, 0, 0);
}

Status ReadBackward(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                    BackwardCall* to) {
  if (params.o.dtype != 0) {
    ATTEND_RETURN_IF_ERROR(ReadTensor("o", params.o, owner, &to->o));
    ATTEND_RETURN_IF_ERROR(ReadTensor("lse", params.lse, owner, &to->lse));
  }
  ATTEND_RETURN_IF_ERROR(ReadTensor("d_o", params.d_o, owner, &to->d_o));
  return ReadTensor("d_lse", params.d_lse, owner, &to->d_lse);
}

attend_client_tensor Tensor(const HostTensor& from) {
  attend_client_tensor to = {};
  to.data = from.data.get();
  to.dtype = static_cast<int32_t>(from.dtype);
  to.dims = static_cast<int32_t>(std::min<size_t>(from.shape.size(), kDimsMax));
  std::copy_n(from.shape.begin(), to.dims, to.shape);
  return to;
}

void FillCheck(const RowsReport& report, attend_client_answer* answer) {
  answer->checked = 1;
  answer->check_ok = report.ok ? 1 : 0;
  answer->rows_checked = report.rows_checked;
  answer->rows_total = report.rows_total;
  answer->rows_wide = report.rows_wide;
  answer->check_undecided = report.undecided ? 1 : 0;
  answer->rows_unjudged = report.rows_unjudged;
  answer->max_abs_error = report.max_abs_error;
  answer->mean_abs_error = report.mean_abs_error;
  answer->error_bound = report.bound;
  answer->check_detail = report.detail.c_str();
}

}  // namespace

std::string TextOf(const char* text) { return text == nullptr ? std::string() : text; }

Status ReadParams(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                  AttentionCall* call) {
  ATTEND_RETURN_IF_ERROR(ReadRequest(params, call));
  ATTEND_RETURN_IF_ERROR(ReadTensor("q", params.q, owner, &call->q));
  // Neither is given: all keys are in the sessions.
  if (params.k.dtype != 0 || params.v.dtype != 0) {
    ATTEND_RETURN_IF_ERROR(ReadTensor("k", params.k, owner, &call->k));
    ATTEND_RETURN_IF_ERROR(ReadTensor("v", params.v, owner, &call->v));
  }
  ATTEND_RETURN_IF_ERROR(ReadTensor("bias", params.bias, owner, &call->bias));
  ATTEND_RETURN_IF_ERROR(ReadTree(params, owner, call));
  return call->backward ? ReadBackward(params, owner, &*call->backward) : Status();
}

Status ReadOptions(const attend_client_params& params, const std::string& tenant,
                   CallOptions* options) {
  ATTEND_RETURN_IF_ERROR(CheckRange("timeout_ns", params.timeout_ns, 0, INT64_MAX));
  ATTEND_RETURN_IF_ERROR(
      CheckRange("transport", params.transport, ATTEND_CLIENT_AUTO, ATTEND_CLIENT_SHARED));
  options->timeout = std::chrono::nanoseconds(params.timeout_ns);
  options->transport = params.transport == ATTEND_CLIENT_CHUNKED  ? CallTransport::kChunked
                       : params.transport == ATTEND_CLIENT_INLINE ? CallTransport::kInline
                                                                  : CallTransport::kAuto;
  options->tenant = params.tenant == nullptr ? tenant : params.tenant;
  options->traceparent = TextOf(params.traceparent);
  return Status();
}

void FillAnswer(const CallOutcome& outcome, attend_client_answer* answer) {
  const AttentionResult& result = outcome.result;
  *answer = {};
  answer->struct_bytes = sizeof(attend_client_answer);
  answer->code = static_cast<int32_t>(outcome.status.code());
  answer->attempts = outcome.attempts;
  answer->message = outcome.status.message().c_str();
  answer->session_lengths = {result.session_lengths.data(), std::ssize(result.session_lengths)};
  answer->sessions_ending = result.sessions_ending ? 1 : 0;
  answer->request_id = result.request_id.c_str();
  answer->kernel = result.kernel.c_str();
  answer->kernel_reason = result.kernel_reason.c_str();
  answer->device = result.device.c_str();
  answer->transport = result.transport.c_str();
  answer->check_detail = "";
  if (!outcome.status.ok()) return;
  for (const auto& [name, field] : kAnswerFields) {
    if (const HostTensor* const tensor = TensorOf(result, name)) answer->*field = Tensor(*tensor);
  }
  const PhaseTimings& timings = result.timings;
  answer->receive_ns = timings.receive_ns;
  answer->queue_ns = timings.queue_ns;
  answer->copy_in_ns = timings.copy_in_ns;
  answer->kernel_ns = timings.kernel_ns;
  answer->copy_out_ns = timings.copy_out_ns;
  answer->check_ns = timings.check_ns;
  answer->total_ns = timings.total_ns;
  answer->batch_requests = result.batch_requests;
  if (result.check) FillCheck(*result.check, answer);
}

}  // namespace attend::client::c
