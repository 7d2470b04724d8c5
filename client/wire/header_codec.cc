// SPDX-License-Identifier: Apache-2.0
//
// The small fields of a call as a message, and the check of an answer's tensors against the call.

#include "client/wire/message_codec.h"

#include <algorithm>
#include <cassert>
#include <utility>

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

const char* Article(v1::TensorName name) {
  return name == v1::TENSOR_NAME_O || name == v1::TENSOR_NAME_LSE ? "an " : "a ";
}

void FillBackward(const BackwardCall& from, v1::BackwardPass* to) {
  FillTensor(from.o, to->mutable_o());
  FillTensor(from.lse, to->mutable_lse());
  FillTensor(from.d_o, to->mutable_d_o());
  if (from.d_lse) FillTensor(*from.d_lse, to->mutable_d_lse());
  for (const auto& [wanted, name] :
       {std::pair{from.d_q, v1::TENSOR_NAME_D_Q}, std::pair{from.d_k, v1::TENSOR_NAME_D_K},
        std::pair{from.d_v, v1::TENSOR_NAME_D_V}, std::pair{from.d_bias, v1::TENSOR_NAME_D_BIAS},
        std::pair{from.d_sinks, v1::TENSOR_NAME_D_SINKS}}) {
    if (wanted) to->add_wanted(name);
  }
}

std::optional<int64_t> BytesOf(const char* name, DType dtype, const std::vector<int64_t>& shape) {
  const Result<int64_t> bytes = TensorBytes(name, dtype, shape);
  return bytes.ok() ? std::optional(*bytes) : std::nullopt;
}

Status CheckBytes(v1::TensorName name, int64_t bytes, std::optional<int64_t> asked) {
  if (!asked || bytes == *asked) return Status();
  return Internal("the server's answer has " + std::string(Article(name)) + NameOf(name) + " of " +
                  std::to_string(bytes) + " bytes, the request's has " + std::to_string(*asked));
}

}  // namespace

AnswerSizes SizesOf(const AttentionCall& call) {
  AnswerSizes sizes;
  if (!call.backward && !HasKeys(call)) sizes.push_back({v1::TENSOR_NAME_O, std::nullopt});
  for (const AnswerTensor& each : AnswerTensors(call)) {
    sizes.push_back({each.name, BytesOf(NameOf(each.name), each.dtype, each.shape)});
  }
  return sizes;
}

Status EncodedCall::CheckAnswer(const AttentionResult& result) const {
  assert(chunked_ == nullptr && "it is not one message");
  for (const v1::TensorName name : kAnswerNames) {
    const HostTensor* const tensor = TensorOf(result, name);
    const auto asked = std::find_if(sizes_.begin(), sizes_.end(),
                                    [&](const AnswerSize& each) { return each.name == name; });
    const bool wanted = asked != sizes_.end();
    if ((tensor != nullptr) != wanted) {
      const std::string what = NameOf(name);
      return Internal(wanted ? "the server's answer has no " + what + ", but one was requested"
                             : "the server's answer has " + std::string(Article(name)) + what +
                                   ", but none was requested");
    }
    if (wanted) ATTEND_RETURN_IF_ERROR(CheckBytes(name, tensor->bytes, asked->bytes));
  }
  return Status();
}

const v1::Tensor* TensorOf(const v1::AttendResponse& response, v1::TensorName name) {
  const v1::Gradients& g = response.gradients();
  const auto present = [](bool has, const v1::Tensor& tensor) { return has ? &tensor : nullptr; };
  switch (name) {
    case v1::TENSOR_NAME_O:
      return present(response.has_o(), response.o());
    case v1::TENSOR_NAME_LSE:
      return present(response.has_lse(), response.lse());
    case v1::TENSOR_NAME_D_Q:
      return present(g.has_d_q(), g.d_q());
    case v1::TENSOR_NAME_D_K:
      return present(g.has_d_k(), g.d_k());
    case v1::TENSOR_NAME_D_V:
      return present(g.has_d_v(), g.d_v());
    case v1::TENSOR_NAME_D_BIAS:
      return present(g.has_d_bias(), g.d_bias());
    case v1::TENSOR_NAME_D_SINKS:
      return present(g.has_d_sinks(), g.d_sinks());
    default:
      return nullptr;
  }
}

void FillOutputs(const SharedOutputs& from, v1::AttendRequest* to) {
  const auto fill = [&](const std::optional<SharedPlace>& place, const auto& placement) {
    if (place) FillPlace(*place, placement()->mutable_shared_memory());
  };
  fill(from.o, [&] { return to->mutable_o_placement(); });
  fill(from.lse, [&] { return to->mutable_lse_placement(); });
  fill(from.d_q, [&] { return to->mutable_backward()->mutable_d_q_placement(); });
  fill(from.d_k, [&] { return to->mutable_backward()->mutable_d_k_placement(); });
  fill(from.d_v, [&] { return to->mutable_backward()->mutable_d_v_placement(); });
  fill(from.d_bias, [&] { return to->mutable_backward()->mutable_d_bias_placement(); });
  fill(from.d_sinks, [&] { return to->mutable_backward()->mutable_d_sinks_placement(); });
}

bool UsesSharedMemory(const AttentionCall& call) {
  bool any = call.outputs.any();
  ForTensors(call, [&](v1::TensorName, const TensorRef& tensor) {
    any |= tensor.shared.region != nullptr;
  });
  return any;
}

v1::AttendRequest RequestHeader(const AttentionCall& call) {
  v1::AttendRequest m;
  FillTensor(call.q, m.mutable_q());
  if (HasKeys(call)) {
    FillTensor(call.k, m.mutable_k());
    FillTensor(call.v, m.mutable_v());
  }
  if (call.bias) FillTensor(*call.bias, m.mutable_bias());
  if (call.tree) {
    // Without bits that can be sent, the server refuses the request.
    if (call.tree->dtype == DType::kBit && call.tree->data != nullptr) {
      m.set_tree(call.tree->data, static_cast<size_t>(call.tree->bytes));
    }
    m.set_tree_tokens(call.tree->shape.empty() ? 0 : call.tree->shape.back());
  }
  *m.mutable_tree_lengths() = {call.tree_lengths.begin(), call.tree_lengths.end()};
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
  if (call.mask.key_offset != 0) m.mutable_mask()->set_key_offset(call.mask.key_offset);
  if (call.mask.keys_after != 0) m.mutable_mask()->set_keys_after(call.mask.keys_after);
  m.set_softcap(call.softcap);
  *m.mutable_alibi_slopes() = {call.alibi_slopes.begin(), call.alibi_slopes.end()};
  *m.mutable_sinks() = {call.sinks.begin(), call.sinks.end()};
  m.set_dropout_p(call.dropout_p);
  m.set_dropout_seed(call.dropout_seed);
  m.set_return_lse(call.return_lse);
  if (call.o_float32) m.set_o_dtype(v1::DTYPE_FLOAT32);
  m.set_kernel(call.kernel);
  m.set_check(call.check);
  m.set_priority(call.priority);
  if (call.backward) FillBackward(*call.backward, m.mutable_backward());
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
