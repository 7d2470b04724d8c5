// SPDX-License-Identifier: Apache-2.0

#include "client/call/attention_call.h"

#include <algorithm>
#include <array>
#include <cassert>

#include "client/call/tree_mask.h"

namespace attend::client {
namespace {

Status CheckRank(const char* name, const TensorRef& tensor, size_t rank) {
  if (tensor.shape.size() != rank) {
    return InvalidArgument(std::string(name) + ": shape " + ShapeText(tensor.shape) + " has " +
                           std::to_string(tensor.shape.size()) + " dimensions, must have " +
                           std::to_string(rank));
  }
  const Result<int64_t> bytes = TensorBytes(name, tensor.dtype, tensor.shape);
  if (!bytes.ok()) return bytes.status();
  if (*bytes != tensor.bytes) {
    return InvalidArgument(std::string(name) + ": " + std::to_string(tensor.bytes) +
                           " bytes given, shape " + ShapeText(tensor.shape) + " needs " +
                           std::to_string(*bytes));
  }
  return Status();
}

// B, H, L, D of a dense or packed tensor (packed: B = 1).
struct Dims {
  int64_t b, h, l, d;
};

Dims DimsOf(v1::Layout layout, const std::vector<int64_t>& s) {
  switch (layout) {
    case v1::LAYOUT_BLHD:
      return {s[0], s[2], s[1], s[3]};
    case v1::LAYOUT_LHD:
      return {1, s[1], s[0], s[2]};
    default:
      return {s[0], s[1], s[2], s[3]};
  }
}

template <class View, class Data>
View ViewOf(v1::Layout layout, const Dims& dims, Data* data) {
  const bool packed = layout == v1::LAYOUT_LHD;
  const bool rows_first = packed || layout == v1::LAYOUT_BLHD;
  View view;
  view.data = data;
  view.stride_b = packed ? 0 : dims.h * dims.l * dims.d;
  view.stride_h = rows_first ? dims.d : dims.l * dims.d;
  view.stride_l = rows_first ? dims.h * dims.d : dims.d;
  return view;
}

Status CheckCumulative(const char* name, const std::vector<int64_t>& cu, int64_t rows) {
  if (cu.size() < 2 || cu.front() != 0 || cu.back() != rows ||
      !std::is_sorted(cu.begin(), cu.end())) {
    return InvalidArgument(std::string(name) + " has " + std::to_string(cu.size()) +
                           " entries; it must have at least 2, start with 0, never fall and end "
                           "with the tensor's " +
                           std::to_string(rows) + " rows");
  }
  return Status();
}

Status CheckLengths(const char* name, const std::vector<int64_t>& lengths, int64_t batch,
                    int64_t bound) {
  if (lengths.empty()) return Status();
  if (static_cast<int64_t>(lengths.size()) != batch) {
    return InvalidArgument(std::string(name) + " has " + std::to_string(lengths.size()) +
                           " entries, must have B = " + std::to_string(batch) + " or none");
  }
  for (const int64_t length : lengths) {
    if (length < 0 || length > bound) {
      return InvalidArgument(std::string(name) + " holds " + std::to_string(length) +
                             ", must be in [0, " + std::to_string(bound) + "]");
    }
  }
  return Status();
}

int64_t Longest(const std::vector<int64_t>& cu) {
  int64_t longest = 0;
  for (size_t i = 1; i < cu.size(); ++i) longest = std::max(longest, cu[i] - cu[i - 1]);
  return longest;
}

Status FillShape(const AttentionCall& call, const Dims& q, const Dims& k, const Dims& v,
                 Problem& p) {
  if (k.b != q.b || v.b != q.b || v.h != k.h || v.l != k.l || k.d != q.d) {
    return InvalidArgument("shapes of q " + ShapeText(call.q.shape) + ", k " +
                           ShapeText(call.k.shape) + " and v " + ShapeText(call.v.shape) +
                           " do not fit together");
  }
  if (call.q.dtype == DType::kBit)
    return InvalidArgument("q has the dtype of bits, which only bias may have");
  if (call.k.dtype != call.q.dtype || call.v.dtype != call.q.dtype) {
    return InvalidArgument("dtypes of q, k and v differ: " + std::string(DTypeName(call.q.dtype)) +
                           ", " + std::string(DTypeName(call.k.dtype)) + ", " +
                           std::string(DTypeName(call.v.dtype)));
  }
  p.dtype = call.q.dtype;
  p.o_float32 = call.o_float32;
  p.heads_q = q.h;
  p.heads_kv = k.h;
  p.dim = q.d;
  p.dim_v = v.d;
  if (call.layout == v1::LAYOUT_LHD) {
    ATTEND_RETURN_IF_ERROR(CheckCumulative("cu_q", call.cu_q, q.l));
    ATTEND_RETURN_IF_ERROR(CheckCumulative("cu_kv", call.cu_kv, k.l));
    if (call.cu_q.size() != call.cu_kv.size()) {
      return InvalidArgument("cu_q has " + std::to_string(call.cu_q.size()) +
                             " entries and cu_kv " + std::to_string(call.cu_kv.size()) +
                             ", must be the same");
    }
    p.packed = true;
    p.batch = static_cast<int64_t>(call.cu_q.size()) - 1;
    p.total_q = q.l;
    p.total_k = k.l;
    p.len_q = Longest(call.cu_q);
    p.len_k = Longest(call.cu_kv);
    return Status();
  }
  p.batch = q.b;
  p.len_q = q.l;
  p.len_k = k.l;
  ATTEND_RETURN_IF_ERROR(CheckLengths("q_lengths", call.q_lengths, p.batch, p.len_q));
  return CheckLengths("kv_lengths", call.kv_lengths, p.batch, p.len_k);
}

Status FillBias(const TensorRef& bias, Attention& a) {
  ATTEND_RETURN_IF_ERROR(CheckRank("bias", bias, 4));
  const Problem& p = a.problem;
  const auto& s = bias.shape;
  if ((s[0] != 1 && s[0] != p.batch) || (s[1] != 1 && s[1] != p.heads_q) ||
      (s[2] != 1 && s[2] != p.len_q) || s[3] != p.len_k) {
    return InvalidArgument("bias: shape " + ShapeText(s) + " is not broadcastable to " +
                           ShapeText({p.batch, p.heads_q, p.len_q, p.len_k}));
  }
  a.bias.data = bias.data;
  a.bias.dtype = bias.dtype;
  const int64_t row = bias.dtype == DType::kBit ? 8 * RowBytes(bias.dtype, s[3]) : s[3];
  a.bias.stride_q = s[2] == 1 ? 0 : row;
  a.bias.stride_h = s[1] == 1 ? 0 : s[2] * row;
  a.bias.stride_b = s[0] == 1 ? 0 : s[1] * s[2] * row;
  return Status();
}

Status FillPerHead(const AttentionCall& call, Attention& a) {
  const Problem& p = a.problem;
  const int64_t slopes = static_cast<int64_t>(call.alibi_slopes.size());
  if (slopes != 0) {
    if (slopes != p.heads_q && slopes != p.batch * p.heads_q) {
      return InvalidArgument("alibi_slopes has " + std::to_string(slopes) +
                             " entries, must have Hq or B * Hq");
    }
    a.alibi_slopes = call.alibi_slopes.data();
    a.alibi_stride_b = slopes == p.heads_q ? 0 : p.heads_q;
  }
  if (!call.sinks.empty()) {
    if (static_cast<int64_t>(call.sinks.size()) != p.heads_q) {
      return InvalidArgument("sinks has " + std::to_string(call.sinks.size()) +
                             " entries, must have Hq = " + std::to_string(p.heads_q));
    }
    a.sinks = call.sinks.data();
  }
  return Status();
}

Status FillOutput(const AttentionCall& call, const HostTensor* o, const HostTensor* lse,
                  Attention& a) {
  const Problem& p = a.problem;
  const std::vector<int64_t> expected = AnswerShape(call);
  if (o != nullptr) {
    if (o->shape != expected || o->dtype != p.o_dtype()) {
      return InvalidArgument("o: " + std::string(DTypeName(o->dtype)) + " " + ShapeText(o->shape) +
                             ", must be " + std::string(DTypeName(p.o_dtype())) + " " +
                             ShapeText(expected));
    }
    a.o = ViewOf<TensorView, void>(call.layout, DimsOf(call.layout, expected), o->data.get());
  }
  if (lse != nullptr) {
    const std::vector<int64_t> lse_shape = LseShape(call);
    if (lse->shape != lse_shape || lse->dtype != DType::kFloat32) {
      return InvalidArgument("lse: " + std::string(DTypeName(lse->dtype)) + " " +
                             ShapeText(lse->shape) + ", must be float32 " + ShapeText(lse_shape));
    }
    a.lse = reinterpret_cast<float*>(lse->data.get());
    a.lse_stride_h = p.packed ? p.total_q : p.len_q;
    a.lse_stride_b = p.packed ? 0 : p.heads_q * p.len_q;
  }
  return Status();
}

// The member of that name, d_q to d_sinks; null for other names. Const if `gradients` is.
template <class Gradients>
auto* GradientOf(Gradients& gradients, v1::TensorName name) {
  switch (name) {
    case v1::TENSOR_NAME_D_Q:
      return &gradients.d_q;
    case v1::TENSOR_NAME_D_K:
      return &gradients.d_k;
    case v1::TENSOR_NAME_D_V:
      return &gradients.d_v;
    case v1::TENSOR_NAME_D_BIAS:
      return &gradients.d_bias;
    case v1::TENSOR_NAME_D_SINKS:
      return &gradients.d_sinks;
    default:
      return static_cast<decltype(&gradients.d_q)>(nullptr);
  }
}

}  // namespace

attend::Mask MaskOf(const MaskOption& option) {
  const v1::Mask::Kind kind = option.kind;
  const bool top_left =
      kind == v1::Mask::KIND_CAUSAL_TOP_LEFT || kind == v1::Mask::KIND_WINDOW_TOP_LEFT;
  const bool causal =
      kind == v1::Mask::KIND_CAUSAL_TOP_LEFT || kind == v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
  attend::Mask mask;
  if (!causal && !top_left && kind != v1::Mask::KIND_WINDOW_BOTTOM_RIGHT) return mask;
  mask.left = option.window_left.value_or(-1);
  mask.right = causal ? 0 : option.window_right.value_or(-1);
  if (top_left) mask.alignment = Alignment::kTopLeft;
  return mask;
}

Result<Attention> Describe(const AttentionCall& call, const HostTensor* o, const HostTensor* lse) {
  if (!call.sessions.empty()) {
    return InvalidArgument("sessions has " + std::to_string(call.sessions.size()) +
                           " entries, must have none: their K and V are on the server");
  }
  const size_t rank = call.layout == v1::LAYOUT_LHD ? 3 : 4;
  ATTEND_RETURN_IF_ERROR(CheckRank("q", call.q, rank));
  ATTEND_RETURN_IF_ERROR(CheckRank("k", call.k, rank));
  ATTEND_RETURN_IF_ERROR(CheckRank("v", call.v, rank));
  const Dims q = DimsOf(call.layout, call.q.shape);
  const Dims k = DimsOf(call.layout, call.k.shape);
  const Dims v = DimsOf(call.layout, call.v.shape);
  Attention a;
  ATTEND_RETURN_IF_ERROR(FillShape(call, q, k, v, a.problem));
  Problem& p = a.problem;
  p.mask = MaskOf(call.mask);
  p.key_offset = call.mask.key_offset;
  p.keys_after = call.mask.keys_after;
  p.scale = call.scale.value_or(DefaultScale(p.dim));
  p.softcap = call.softcap;
  if (call.bias) SetBias(call.bias->dtype, &p);
  p.has_alibi = !call.alibi_slopes.empty();
  p.has_sinks = !call.sinks.empty();
  p.return_lse = lse != nullptr;
  const Result<int32_t> dropout = DropoutSteps("dropout_p", static_cast<double>(call.dropout_p));
  if (!dropout.ok()) return dropout.status();
  p.dropout = *dropout;
  a.dropout.seed = call.dropout_seed;
  ATTEND_RETURN_IF_ERROR(Check(p));
  a.q = ViewOf<ConstTensorView, const void>(call.layout, q, call.q.data);
  a.k = ViewOf<ConstTensorView, const void>(call.layout, k, call.k.data);
  a.v = ViewOf<ConstTensorView, const void>(call.layout, v, call.v.data);
  if (p.packed) {
    a.q_offsets = call.cu_q.data();
    a.kv_offsets = call.cu_kv.data();
  } else {
    a.q_lengths = call.q_lengths.empty() ? nullptr : call.q_lengths.data();
    a.kv_lengths = call.kv_lengths.empty() ? nullptr : call.kv_lengths.data();
  }
  if (call.bias) ATTEND_RETURN_IF_ERROR(FillBias(*call.bias, a));
  if (call.tree) ATTEND_RETURN_IF_ERROR(DescribeTree(call, &a));
  ATTEND_RETURN_IF_ERROR(FillPerHead(call, a));
  ATTEND_RETURN_IF_ERROR(FillOutput(call, o, lse, a));
  return a;
}

int64_t PayloadBytes(const AttentionCall& call) {
  int64_t bytes = 0;
  ForTensors(call, [&](v1::TensorName, const TensorRef& tensor) { bytes += tensor.bytes; });
  return bytes;
}

std::vector<int64_t> AnswerShape(const AttentionCall& call) {
  std::vector<int64_t> shape = call.q.shape;
  if (!shape.empty() && !call.v.shape.empty()) shape.back() = call.v.shape.back();
  return shape;
}

std::vector<int64_t> LseShape(const AttentionCall& call) {
  std::vector<int64_t> shape = call.q.shape;
  if (shape.size() < 3) return shape;
  shape.pop_back();
  if (call.layout == v1::LAYOUT_BLHD || call.layout == v1::LAYOUT_LHD) {
    std::swap(shape[shape.size() - 2], shape.back());
  }
  return shape;
}

std::vector<AnswerTensor> AnswerTensors(const AttentionCall& call) {
  std::vector<AnswerTensor> tensors;
  if (!call.backward) {
    if (HasKeys(call)) tensors.push_back({v1::TENSOR_NAME_O, AnswerDType(call), AnswerShape(call)});
    if (call.return_lse) tensors.push_back({v1::TENSOR_NAME_LSE, DType::kFloat32, LseShape(call)});
    return tensors;
  }
  const BackwardCall& backward = *call.backward;
  if (backward.d_q) tensors.push_back({v1::TENSOR_NAME_D_Q, call.q.dtype, call.q.shape});
  if (backward.d_k) tensors.push_back({v1::TENSOR_NAME_D_K, call.q.dtype, call.k.shape});
  if (backward.d_v) tensors.push_back({v1::TENSOR_NAME_D_V, call.q.dtype, call.v.shape});
  if (backward.d_bias && call.bias) {
    tensors.push_back({v1::TENSOR_NAME_D_BIAS, DType::kFloat32, call.bias->shape});
  }
  if (backward.d_sinks) {
    tensors.push_back(
        {v1::TENSOR_NAME_D_SINKS, DType::kFloat32, {static_cast<int64_t>(call.sinks.size())}});
  }
  return tensors;
}

const char* NameOf(v1::TensorName name) {
  static constexpr std::array<const char*, v1::TensorName_ARRAYSIZE> kNames = {
      nullptr, "q",     "k",   "v",   "bias", "o",      "lse",
      "d_o",   "d_lse", "d_q", "d_k", "d_v",  "d_bias", "d_sinks"};
  if (!v1::TensorName_IsValid(name) || name == 0) return "a tensor without a name";
  return kNames[name];
}

const HostTensor* TensorOf(const AttentionResult& result, v1::TensorName name) {
  if (name == v1::TENSOR_NAME_O) return result.gradients ? nullptr : &result.o;
  const std::optional<HostTensor>* tensor = nullptr;
  if (name == v1::TENSOR_NAME_LSE) {
    tensor = &result.lse;
  } else if (result.gradients) {
    tensor = GradientOf(*result.gradients, name);
  }
  return tensor != nullptr && *tensor ? &**tensor : nullptr;
}

HostTensor& MakeTensorOf(AttentionResult& result, v1::TensorName name) {
  if (name == v1::TENSOR_NAME_O) return result.o;
  std::optional<HostTensor>* tensor = &result.lse;
  if (name != v1::TENSOR_NAME_LSE) {
    if (!result.gradients) result.gradients.emplace();
    tensor = GradientOf(*result.gradients, name);
    assert(tensor != nullptr && "no answer has such a tensor");
  }
  return *tensor ? **tensor : tensor->emplace();
}

int64_t AnswerBytes(const AttentionCall& call) {
  if (call.backward) {
    int64_t sum = 0;
    for (const AnswerTensor& each : AnswerTensors(call)) {
      const Result<int64_t> bytes = TensorBytes(NameOf(each.name), each.dtype, each.shape);
      if (!bytes.ok() || __builtin_add_overflow(sum, *bytes, &sum)) return 0;
    }
    return sum;
  }
  if (call.q.shape.empty() || call.v.shape.empty() || call.q.shape.back() <= 0) return 0;
  if (call.q.dtype == DType::kBit) return 0;
  int64_t bytes = 0;
  const int64_t widening = DTypeBytes(AnswerDType(call)) / DTypeBytes(call.q.dtype);
  if (__builtin_mul_overflow(call.q.bytes / call.q.shape.back(), call.v.shape.back(), &bytes) ||
      __builtin_mul_overflow(bytes, widening, &bytes)) {
    return 0;
  }
  return bytes;
}

}  // namespace attend::client
