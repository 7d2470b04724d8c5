// SPDX-License-Identifier: Apache-2.0
//
// The small fields of a call as a message, and whether an answer's tensors are those it asked for.

#include "client/wire/message_codec.h"

#include <cassert>

namespace attend::client {
namespace {

void FillPlace(const SharedPlace& from, v1::SharedMemory* to) {
  to->set_region(from.region->token());
  to->set_offset(static_cast<uint64_t>(from.offset));
}

void FillTensor(const TensorRef& from, v1::Tensor* to) {
  to->set_dtype(static_cast<v1::DType>(from.dtype));
  to->mutable_shape()->Add(from.shape.begin(), from.shape.end());
  to->set_byte_length(static_cast<uint64_t>(from.bytes));
  if (from.shared.region != nullptr) {
    FillPlace(from.shared, to->mutable_shared_memory());
  } else {
    to->mutable_inline_bytes();
  }
}

std::optional<int64_t> BytesOf(const char* name, DType dtype, const std::vector<int64_t>& shape) {
  const Result<int64_t> bytes = TensorBytes(name, dtype, shape);
  return bytes.ok() ? std::optional(*bytes) : std::nullopt;
}

Status CheckBytes(const char* name, int64_t bytes, std::optional<int64_t> asked) {
  if (!asked || bytes == *asked) return Status();
  return Internal("the server's answer has an " + std::string(name) + " of " +
                  std::to_string(bytes) + " bytes, the request's has " + std::to_string(*asked));
}

}  // namespace

AnswerSizes SizesOf(const AttentionCall& call) {
  AnswerSizes sizes;
  sizes.has_lse = call.return_lse;
  if (HasKeys(call)) sizes.o = BytesOf("o", AnswerDType(call), AnswerShape(call));
  if (call.return_lse) sizes.lse = BytesOf("lse", DType::kFloat32, LseShape(call));
  return sizes;
}

Status EncodedCall::CheckAnswer(const AttentionResult& result) const {
  assert(chunked_ == nullptr && "it is not one message");
  ATTEND_RETURN_IF_ERROR(CheckBytes("o", result.o.bytes, sizes_.o));
  if (result.lse.has_value() != sizes_.has_lse) {
    return Internal(sizes_.has_lse ? "the server's answer has no lse, but one was requested"
                                   : "the server's answer has an lse, but none was requested");
  }
  return sizes_.has_lse ? CheckBytes("lse", result.lse->bytes, sizes_.lse) : Status();
}

void FillOutputs(const SharedOutputs& from, v1::AttendRequest* to) {
  if (from.o) FillPlace(*from.o, to->mutable_o_placement()->mutable_shared_memory());
  if (from.lse) FillPlace(*from.lse, to->mutable_lse_placement()->mutable_shared_memory());
}

bool UsesSharedMemory(const AttentionCall& call) {
  const auto shared = [](const TensorRef& tensor) { return tensor.shared.region != nullptr; };
  return shared(call.q) || shared(call.k) || shared(call.v) || (call.bias && shared(*call.bias)) ||
         call.outputs.o || call.outputs.lse;
}

v1::AttendRequest RequestHeader(const AttentionCall& call) {
  v1::AttendRequest m;
  FillTensor(call.q, m.mutable_q());
  if (HasKeys(call)) {
    FillTensor(call.k, m.mutable_k());
    FillTensor(call.v, m.mutable_v());
  }
  if (call.bias) FillTensor(*call.bias, m.mutable_bias());
  m.set_layout(call.layout);
  *m.mutable_q_lengths() = {call.q_lengths.begin(), call.q_lengths.end()};
  *m.mutable_kv_lengths() = {call.kv_lengths.begin(), call.kv_lengths.end()};
  *m.mutable_cu_q() = {call.cu_q.begin(), call.cu_q.end()};
  *m.mutable_cu_kv() = {call.cu_kv.begin(), call.cu_kv.end()};
  if (call.scale) m.set_scale(*call.scale);
  if (call.mask.kind != v1::Mask::KIND_NONE || call.mask.window_left || call.mask.window_right) {
    m.mutable_mask()->set_kind(call.mask.kind);
    if (call.mask.window_left) m.mutable_mask()->set_window_left(*call.mask.window_left);
    if (call.mask.window_right) m.mutable_mask()->set_window_right(*call.mask.window_right);
  }
  m.set_softcap(call.softcap);
  *m.mutable_alibi_slopes() = {call.alibi_slopes.begin(), call.alibi_slopes.end()};
  *m.mutable_sinks() = {call.sinks.begin(), call.sinks.end()};
  m.set_return_lse(call.return_lse);
  if (call.o_float32) m.set_o_dtype(v1::DTYPE_FLOAT32);
  m.set_kernel(call.kernel);
  m.set_check(call.check);
  m.set_priority(call.priority);
  FillOutputs(call.outputs, &m);
  for (const SessionUse& use : call.sessions) {
    v1::SessionUse* const to = m.add_sessions();
    to->set_session(use.session);
    to->set_layer(use.layer);
    to->set_length(use.length);
    to->set_append_id(use.append_id);
  }
  return m;
}

}  // namespace attend::client
