// SPDX-License-Identifier: Apache-2.0
//
// The small fields of a call as a message and back, and the check of an answer's tensors against
// the call.

#include "client/wire/message_codec.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/util/utf8.h"

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

// The options that a call and its message have alike: single values, and lists.
#define ATTEND_OPTION_VALUES(DO) \
  DO(softcap)                    \
  DO(dropout_p) DO(dropout_seed) DO(return_lse) DO(kernel) DO(check) DO(priority)
#define ATTEND_OPTION_LISTS(DO) \
  DO(q_lengths)                 \
  DO(kv_lengths) DO(cu_q) DO(cu_kv) DO(tree_lengths) DO(alibi_slopes) DO(sinks)

constexpr std::pair<bool BackwardCall::*, v1::TensorName> kGradients[] = {
    {&BackwardCall::d_q, v1::TENSOR_NAME_D_Q},
    {&BackwardCall::d_k, v1::TENSOR_NAME_D_K},
    {&BackwardCall::d_v, v1::TENSOR_NAME_D_V},
    {&BackwardCall::d_bias, v1::TENSOR_NAME_D_BIAS},
    {&BackwardCall::d_sinks, v1::TENSOR_NAME_D_SINKS}};

void FillBackward(const BackwardCall& from, v1::BackwardPass* to) {
  FillTensor(from.o, to->mutable_o());
  FillTensor(from.lse, to->mutable_lse());
  FillTensor(from.d_o, to->mutable_d_o());
  if (from.d_lse) FillTensor(*from.d_lse, to->mutable_d_lse());
  for (const auto& [wanted, name] : kGradients) {
    if (from.*wanted) to->add_wanted(name);
  }
}

void PutMask(const MaskOption& from, v1::AttendRequest* to) {
  if (from.kind != v1::Mask::KIND_NONE || from.window_left || from.window_right) {
    to->mutable_mask()->set_kind(from.kind);
    if (from.window_left) to->mutable_mask()->set_window_left(*from.window_left);
    if (from.window_right) to->mutable_mask()->set_window_right(*from.window_right);
  }
  if (from.key_offset != 0) to->mutable_mask()->set_key_offset(from.key_offset);
  if (from.keys_after != 0) to->mutable_mask()->set_keys_after(from.keys_after);
}

MaskOption TakeMask(const v1::Mask& from) {
  MaskOption to;
  if (from.kind() != v1::Mask::KIND_UNSPECIFIED) to.kind = from.kind();
  if (from.has_window_left()) to.window_left = from.window_left();
  if (from.has_window_right()) to.window_right = from.window_right();
  to.key_offset = from.key_offset();
  to.keys_after = from.keys_after();
  return to;
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

Status CheckUtf8(const std::string& field, const std::string& text) {
  if (ToUtf8(text, text.size()) == text) return Status();
  return InvalidArgument(field + " is \"" + text + "\", must be UTF-8");
}

Status CheckText(const AttentionCall& call) {
  ATTEND_RETURN_IF_ERROR(CheckUtf8("request_id", call.request_id));
  return CheckUtf8("kernel", call.kernel);
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
#define ATTEND_PUT(name) m.set_##name(call.name);
  ATTEND_OPTION_VALUES(ATTEND_PUT)
#define ATTEND_PUT_LIST(name) m.mutable_##name()->Assign(call.name.begin(), call.name.end());
  ATTEND_OPTION_LISTS(ATTEND_PUT_LIST)
  m.set_layout(call.layout);
  if (call.scale) m.set_scale(*call.scale);
  PutMask(call.mask, &m);
  if (call.o_float32) m.set_o_dtype(v1::DTYPE_FLOAT32);
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

void TakeOptions(const v1::AttendRequest& message, AttentionCall* call) {
  call->request_id = message.request_id();
#define ATTEND_TAKE(name) call->name = message.name();
  ATTEND_OPTION_VALUES(ATTEND_TAKE)
#define ATTEND_TAKE_LIST(name) call->name.assign(message.name().begin(), message.name().end());
  ATTEND_OPTION_LISTS(ATTEND_TAKE_LIST)
  if (message.layout() != v1::LAYOUT_UNSPECIFIED) call->layout = message.layout();
  if (message.has_scale()) call->scale = message.scale();
  call->mask = TakeMask(message.mask());
  call->o_float32 = message.o_dtype() == v1::DTYPE_FLOAT32;
  if (!message.has_backward()) return;
  BackwardCall& backward = call->backward.emplace();
  const auto& asked = message.backward().wanted();
  if (asked.empty()) return;  // the usual ones
  for (const auto& [wanted, name] : kGradients) {
    backward.*wanted = std::count(asked.begin(), asked.end(), name) > 0;
  }
}

}  // namespace attend::client
