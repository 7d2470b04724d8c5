// SPDX-License-Identifier: Apache-2.0

#include "client/c/params.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "client/c/status.h"

namespace attend::client::c {
namespace {

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

template <class List, class Number>
Status ReadList(const char* name, const List& from, std::vector<Number>* to) {
  ATTEND_RETURN_IF_ERROR(CheckRange(std::string(name) + ".count", from.count, 0, INT32_MAX));
  if (from.count == 0) return Status();
  ATTEND_RETURN_IF_ERROR(NotNull(name, from.data));
  to->assign(from.data, from.data + from.count);
  return Status();
}

// Checks only what the message cannot express; the server checks the rest.
Status ReadTree(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                AttentionCall* call) {
  ATTEND_RETURN_IF_ERROR(ReadList("tree_lengths", params.tree_lengths, &call->tree_lengths));
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
  ATTEND_RETURN_IF_ERROR(CheckRange("wanted", params.wanted, 1, 2 * ATTEND_CLIENT_D_SINKS - 1));
  to->d_q = (params.wanted & ATTEND_CLIENT_D_Q) != 0;
  to->d_k = (params.wanted & ATTEND_CLIENT_D_K) != 0;
  to->d_v = (params.wanted & ATTEND_CLIENT_D_V) != 0;
  to->d_bias = (params.wanted & ATTEND_CLIENT_D_BIAS) != 0;
  to->d_sinks = (params.wanted & ATTEND_CLIENT_D_SINKS) != 0;
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

attend_client_tensor Tensor(const std::optional<HostTensor>& from) {
  return from ? Tensor(*from) : attend_client_tensor{};
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

void FillTensors(const AttentionResult& result, attend_client_answer* answer) {
  if (!result.gradients) {
    answer->o = Tensor(result.o);
    answer->lse = Tensor(result.lse);
    return;
  }
  answer->d_q = Tensor(result.gradients->d_q);
  answer->d_k = Tensor(result.gradients->d_k);
  answer->d_v = Tensor(result.gradients->d_v);
  answer->d_bias = Tensor(result.gradients->d_bias);
  answer->d_sinks = Tensor(result.gradients->d_sinks);
}

}  // namespace

std::string TextOf(const char* text) { return text == nullptr ? std::string() : text; }

Status ReadParams(const attend_client_params& params, const std::shared_ptr<const void>& owner,
                  AttentionCall* call) {
  call->request_id = TextOf(params.request_id);
  ATTEND_RETURN_IF_ERROR(ReadTensor("q", params.q, owner, &call->q));
  // Neither is given: all keys are in the sessions.
  if (params.k.dtype != 0 || params.v.dtype != 0) {
    ATTEND_RETURN_IF_ERROR(ReadTensor("k", params.k, owner, &call->k));
    ATTEND_RETURN_IF_ERROR(ReadTensor("v", params.v, owner, &call->v));
  }
  ATTEND_RETURN_IF_ERROR(ReadTensor("bias", params.bias, owner, &call->bias));
  ATTEND_RETURN_IF_ERROR(ReadTree(params, owner, call));
  ATTEND_RETURN_IF_ERROR(CheckRange("layout", params.layout, 0, ATTEND_CLIENT_LHD));
  if (params.layout != 0) call->layout = static_cast<v1::Layout>(params.layout);
  ATTEND_RETURN_IF_ERROR(CheckRange("mask", params.mask, 0, ATTEND_CLIENT_MASK_WINDOW_TOP_LEFT));
  if (params.mask > ATTEND_CLIENT_MASK_NONE) {
    call->mask.kind = static_cast<v1::Mask::Kind>(params.mask);
    call->mask.window_left = params.window_left;
    if (params.mask >= ATTEND_CLIENT_MASK_WINDOW_BOTTOM_RIGHT) {
      call->mask.window_right = params.window_right;
    }
  }
  call->mask.key_offset = params.key_offset;
  call->mask.keys_after = params.keys_after;
  if (params.has_scale != 0) call->scale = params.scale;
  call->softcap = params.softcap;
  call->dropout_p = params.dropout_p;
  call->dropout_seed = params.dropout_seed;
  ATTEND_RETURN_IF_ERROR(ReadList("q_lengths", params.q_lengths, &call->q_lengths));
  ATTEND_RETURN_IF_ERROR(ReadList("kv_lengths", params.kv_lengths, &call->kv_lengths));
  ATTEND_RETURN_IF_ERROR(ReadList("cu_q", params.cu_q, &call->cu_q));
  ATTEND_RETURN_IF_ERROR(ReadList("cu_kv", params.cu_kv, &call->cu_kv));
  ATTEND_RETURN_IF_ERROR(ReadList("alibi_slopes", params.alibi_slopes, &call->alibi_slopes));
  ATTEND_RETURN_IF_ERROR(ReadList("sinks", params.sinks, &call->sinks));
  call->return_lse = params.return_lse != 0;
  call->o_float32 = params.o_float32 != 0;
  call->check = params.check != 0;
  call->priority = params.priority;
  call->kernel = TextOf(params.kernel);
  if (params.wanted == 0) return Status();
  return ReadBackward(params, owner, &call->backward.emplace());
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
  FillTensors(result, answer);
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
