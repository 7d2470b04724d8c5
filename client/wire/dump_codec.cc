// SPDX-License-Identifier: Apache-2.0
//
// A request read from disk as a call: the reverse of the encoder in message_codec.cc, for replay.

#include "client/wire/message_codec.h"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace attend::client {
namespace {

constexpr char kBias[] = "bias";

Result<TensorRef> RefOf(const char* name, const v1::Tensor& meta, int raw_index,
                        const std::shared_ptr<const v1::AttendRequest>& request) {
  const bool is_bias = std::string_view(name) == kBias;
  const bool mask = meta.dtype() == v1::DTYPE_BIT && is_bias;
  if (!IsDType(meta.dtype()) && !mask) {
    return InvalidArgument(std::string(name) + ": dtype is " + std::to_string(meta.dtype()) +
                           ", must be 1 (float16), 2 (bfloat16) or 3 (float32)" +
                           (is_bias ? ", or 4 (bit)" : ""));
  }
  if (raw_index >= request->raw_size()) {
    return InvalidArgument(std::string(name) + ": raw has " + std::to_string(request->raw_size()) +
                           " entries, none for this tensor");
  }
  const std::string& bytes = request->raw(raw_index);
  TensorRef ref;
  ref.dtype = static_cast<DType>(meta.dtype());
  ref.shape.assign(meta.shape().begin(), meta.shape().end());
  ref.data = bytes.data();
  ref.bytes = static_cast<int64_t>(bytes.size());
  ref.owner = request;
  return ref;
}

// The backward pass of `request`; its tensors begin at `raw_index`.
Result<BackwardCall> BackwardOf(const std::shared_ptr<const v1::AttendRequest>& request,
                                int raw_index) {
  const v1::BackwardPass& from = request->backward();
  BackwardCall to;
  TensorRef d_lse;
  std::vector<std::tuple<const char*, const v1::Tensor*, TensorRef*>> tensors = {
      {"o", &from.o(), &to.o}, {"lse", &from.lse(), &to.lse}, {"d_o", &from.d_o(), &to.d_o}};
  if (from.has_d_lse()) tensors.emplace_back("d_lse", &from.d_lse(), &d_lse);
  for (const auto& [name, meta, target] : tensors) {
    Result<TensorRef> ref = RefOf(name, *meta, raw_index++, request);
    if (!ref.ok()) return ref.status();
    *target = std::move(*ref);
  }
  if (from.has_d_lse()) to.d_lse = std::move(d_lse);
  const auto wanted = [&](v1::TensorName name) {
    return std::count(from.wanted().begin(), from.wanted().end(), name) > 0;
  };
  const bool usual = from.wanted_size() == 0;
  to.d_q = usual || wanted(v1::TENSOR_NAME_D_Q);
  to.d_k = usual || wanted(v1::TENSOR_NAME_D_K);
  to.d_v = usual || wanted(v1::TENSOR_NAME_D_V);
  to.d_bias = wanted(v1::TENSOR_NAME_D_BIAS);
  to.d_sinks = wanted(v1::TENSOR_NAME_D_SINKS);
  return to;
}

}  // namespace

Result<AttentionCall> CallFromRequest(std::shared_ptr<const v1::AttendRequest> request) {
  const v1::AttendRequest& m = *request;
  AttentionCall call;
  int raw_index = 0;
  for (const auto& [name, meta, target] :
       {std::tuple{"q", &m.q(), &call.q}, std::tuple{"k", &m.k(), &call.k},
        std::tuple{"v", &m.v(), &call.v}}) {
    Result<TensorRef> ref = RefOf(name, *meta, raw_index++, request);
    if (!ref.ok()) return ref.status();
    *target = std::move(*ref);
  }
  if (m.has_bias()) {
    Result<TensorRef> ref = RefOf(kBias, m.bias(), raw_index++, request);
    if (!ref.ok()) return ref.status();
    call.bias = std::move(*ref);
  }
  if (!m.tree().empty()) {
    const int64_t tokens = m.tree_tokens();
    const Result<int64_t> one = TensorBytes("tree", DType::kBit, {1, tokens, tokens});
    if (!one.ok()) return one.status();
    const auto bytes = std::ssize(m.tree());
    call.tree.emplace(DType::kBit,
                      std::vector<int64_t>{*one == 0 ? 0 : bytes / *one, tokens, tokens},
                      m.tree().data(), bytes);
    call.tree->owner = request;
  }
  if (m.has_backward()) {
    Result<BackwardCall> backward = BackwardOf(request, raw_index);
    if (!backward.ok()) return backward.status();
    call.backward = std::move(*backward);
  }
  call.request_id = m.request_id();
  call.layout = m.layout() == v1::LAYOUT_UNSPECIFIED ? v1::LAYOUT_BHLD : m.layout();
  call.q_lengths.assign(m.q_lengths().begin(), m.q_lengths().end());
  call.kv_lengths.assign(m.kv_lengths().begin(), m.kv_lengths().end());
  call.cu_q.assign(m.cu_q().begin(), m.cu_q().end());
  call.cu_kv.assign(m.cu_kv().begin(), m.cu_kv().end());
  call.tree_lengths.assign(m.tree_lengths().begin(), m.tree_lengths().end());
  if (m.has_scale()) call.scale = m.scale();
  call.mask.kind =
      m.mask().kind() == v1::Mask::KIND_UNSPECIFIED ? v1::Mask::KIND_NONE : m.mask().kind();
  if (m.mask().has_window_left()) call.mask.window_left = m.mask().window_left();
  if (m.mask().has_window_right()) call.mask.window_right = m.mask().window_right();
  call.mask.key_offset = m.mask().key_offset();
  call.mask.keys_after = m.mask().keys_after();
  call.o_float32 = m.o_dtype() == v1::DTYPE_FLOAT32;
  call.softcap = m.softcap();
  call.alibi_slopes.assign(m.alibi_slopes().begin(), m.alibi_slopes().end());
  call.sinks.assign(m.sinks().begin(), m.sinks().end());
  call.dropout_p = m.dropout_p();
  call.dropout_seed = m.dropout_seed();
  call.return_lse = m.return_lse();
  call.kernel = m.kernel();
  call.check = m.check();
  call.priority = m.priority();
  return call;
}

}  // namespace attend::client
