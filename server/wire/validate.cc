// SPDX-License-Identifier: Apache-2.0

#include "server/wire/validate.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/contract/limits.h"
#include "kernels/util/counted.h"
#include "server/wire/tensor_rules.h"
#include "server/wire/validate_backward.h"
#include "server/wire/validate_lengths.h"
#include "server/wire/validate_tree.h"

namespace attend {
namespace {

using Text = std::string;

class Validator {
 public:
  Validator(const v1::AttendRequest& request, const WireArrays& arrays, const CacheHold* cache,
            Validated& out)
      : request_(request),
        arrays_(arrays),
        cache_(cache),
        out_(out),
        problem_(out.attention.problem) {}

  Status Run() {
    ATTEND_RETURN_IF_ERROR(SmallFields());
    ATTEND_RETURN_IF_ERROR(MaskFields());
    ATTEND_RETURN_IF_ERROR(Tensors());
    ATTEND_RETURN_IF_ERROR(CheckLengths(arrays_, problem_));
    if (!request_.has_scale() && problem_.dim > 0) {
      problem_.scale = DefaultScale(problem_.dim);
    }
    ATTEND_RETURN_IF_ERROR(Check(problem_));
    ATTEND_RETURN_IF_ERROR(HeadArrays());
    Strides();
    ATTEND_RETURN_IF_ERROR(Bias());
    ATTEND_RETURN_IF_ERROR(ValidateTree(request_, arrays_, cache_, out_));
    if (request_.has_backward()) return ValidateBackward(request_, out_);
    out_.Want(Output::kO);
    if (problem_.return_lse) out_.Want(Output::kLse);
    return Status();
  }

 private:
  Status SmallFields();
  Status MaskFields();
  Status Tensors();
  Status OutputDType();
  Status Keys(const Dims& dims);
  Status CachedKeys(const Dims& dims);
  Status HeadArrays();
  void Strides();
  Status Bias();

  const v1::AttendRequest& request_;
  const WireArrays& arrays_;
  const CacheHold* const cache_;
  Validated& out_;
  Problem& problem_;
};

Status Validator::SmallFields() {
  if (static_cast<int64_t>(request_.request_id().size()) > kRequestIdBytesMax) {
    return InvalidArgument("request_id has " + std::to_string(request_.request_id().size()) +
                           " bytes, must have at most " + std::to_string(kRequestIdBytesMax));
  }
  if (request_.priority() < -kPriorityMax || request_.priority() > kPriorityMax) {
    return InvalidArgument("priority is " + std::to_string(request_.priority()) +
                           ", must be in [-100, 100]");
  }
  switch (static_cast<int>(request_.layout())) {
    case v1::LAYOUT_UNSPECIFIED:
    case v1::LAYOUT_BHLD:
      out_.layout = Layout::kBhld;
      break;
    case v1::LAYOUT_BLHD:
      out_.layout = Layout::kBlhd;
      break;
    case v1::LAYOUT_LHD:
      out_.layout = Layout::kLhd;
      problem_.packed = true;
      break;
    default:
      return WrongEnum("layout", request_.layout(), "BHLD (1), BLHD (2) or LHD (3)");
  }
  problem_.scale = request_.scale();
  problem_.softcap = request_.softcap();
  problem_.return_lse = request_.return_lse();
  const Result<int32_t> dropout =
      DropoutSteps("dropout_p", static_cast<double>(request_.dropout_p()));
  if (!dropout.ok()) return dropout.status();
  problem_.dropout = *dropout;
  out_.attention.dropout.seed = request_.dropout_seed();
  if (request_.has_backward()) {
    if (problem_.return_lse)
      return InvalidArgument("return_lse is set, must be unset with backward");
    problem_.return_lse = true;  // the request contains it
  }
  return Status();
}

Status Validator::MaskFields() {
  const v1::Mask& mask = request_.mask();
  const int kind = mask.kind();
  bool window = false;
  bool causal = false;
  switch (kind) {
    case v1::Mask::KIND_UNSPECIFIED:
    case v1::Mask::KIND_NONE:
      break;
    case v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT:
    case v1::Mask::KIND_CAUSAL_TOP_LEFT:
      causal = true;
      break;
    case v1::Mask::KIND_WINDOW_BOTTOM_RIGHT:
    case v1::Mask::KIND_WINDOW_TOP_LEFT:
      window = true;
      break;
    default:
      return WrongEnum("mask.kind", kind, "in [0, 5]");
  }
  if (mask.has_window_left() && !causal && !window) {
    return InvalidArgument("mask.window_left is " + std::to_string(mask.window_left()) +
                           ", must be unset without a causal or window mask.kind");
  }
  if (mask.has_window_right() && !window) {
    return InvalidArgument("mask.window_right is " + std::to_string(mask.window_right()) +
                           ", must be unset without a window mask.kind");
  }
  for (const auto& [name, value] :
       {std::pair{"mask.window_left", mask.has_window_left() ? mask.window_left() : -1},
        std::pair{"mask.window_right", mask.has_window_right() ? mask.window_right() : -1}}) {
    if (value < -1) {
      return InvalidArgument(Text(name) + " is " + std::to_string(value) +
                             ", must be at least 0, or -1 for no bound");
    }
  }
  for (const auto& [name, keys, to] :
       {std::tuple{"mask.key_offset", mask.key_offset(), &problem_.key_offset},
        std::tuple{"mask.keys_after", mask.keys_after(), &problem_.keys_after}}) {
    if (keys < 0 || keys > kLengthMax) {
      return InvalidArgument(Text(name) + " is " + std::to_string(keys) + ", must be in [0, " +
                             std::to_string(kLengthMax) + "]");
    }
    *to = keys;
  }
  const bool top_left =
      kind == v1::Mask::KIND_CAUSAL_TOP_LEFT || kind == v1::Mask::KIND_WINDOW_TOP_LEFT;
  problem_.mask.alignment = top_left ? Alignment::kTopLeft : Alignment::kBottomRight;
  problem_.mask.left = mask.has_window_left() ? mask.window_left() : -1;
  problem_.mask.right = causal ? 0 : mask.has_window_right() ? mask.window_right() : -1;
  return Status();
}

Status Validator::Tensors() {
  const Dims dims = DimsOf(out_.layout);
  const v1::Tensor& q = request_.q();
  const bool no_keys = cache_ != nullptr && !request_.has_k() && !request_.has_v();
  for (const auto& [name, present] :
       {std::pair{"q", request_.has_q()}, std::pair{"k", no_keys || request_.has_k()},
        std::pair{"v", no_keys || request_.has_v()}}) {
    if (!present) return InvalidArgument(Text(name) + " is not set, must be a tensor");
  }
  out_.present = {true, !no_keys, !no_keys};
  ATTEND_RETURN_IF_ERROR(
      CheckTensor("q", q, dims.rank, dims.text_q, problem_.dtype, out_.tensor_bytes[0]));
  ATTEND_RETURN_IF_ERROR(OutputDType());
  if (dims.b >= 0) problem_.batch = q.shape(dims.b);
  problem_.heads_q = q.shape(dims.h);
  problem_.dim = q.shape(dims.d);
  (problem_.packed ? problem_.total_q : problem_.len_q) = q.shape(dims.l);
  if (!no_keys) ATTEND_RETURN_IF_ERROR(Keys(dims));
  return cache_ == nullptr ? Status() : CachedKeys(dims);
}

Status Validator::OutputDType() {
  const v1::DType asked = request_.o_dtype();
  if (asked == v1::DTYPE_UNSPECIFIED) return Status();
  problem_.o_float32 = asked == v1::DTYPE_FLOAT32;
  if (problem_.o_float32 || asked == request_.q().dtype()) return Status();
  return WrongEnum("o_dtype", asked,
                   "q.dtype " + Text(DTypeName(problem_.dtype)) + " or FLOAT32 (3)");
}

Status Validator::Keys(const Dims& dims) {
  DType dtype_k, dtype_v;
  const v1::Tensor& k = request_.k();
  const v1::Tensor& v = request_.v();
  auto& bytes = out_.tensor_bytes;
  ATTEND_RETURN_IF_ERROR(CheckTensor("k", k, dims.rank, dims.text_k, dtype_k, bytes[1]));
  ATTEND_RETURN_IF_ERROR(CheckTensor("v", v, dims.rank, dims.text_v, dtype_v, bytes[2]));
  for (const auto& [name, dtype] : {std::pair{"k", dtype_k}, std::pair{"v", dtype_v}}) {
    ATTEND_RETURN_IF_ERROR(MustHaveDType(name, dtype, "q.dtype", problem_.dtype));
  }
  if (dims.b >= 0) {
    ATTEND_RETURN_IF_ERROR(MustAgree("k", k, dims.b, "B", "q", problem_.batch));
    ATTEND_RETURN_IF_ERROR(MustAgree("v", v, dims.b, "B", "q", problem_.batch));
  }
  problem_.heads_kv = k.shape(dims.h);
  problem_.dim_v = v.shape(dims.d);
  (problem_.packed ? problem_.total_k : problem_.len_k) = k.shape(dims.l);
  ATTEND_RETURN_IF_ERROR(MustAgree("k", k, dims.d, "D", "q", problem_.dim));
  ATTEND_RETURN_IF_ERROR(MustAgree("v", v, dims.h, "Hkv", "k", problem_.heads_kv));
  return MustAgree("v", v, dims.l, problem_.packed ? "kv rows" : "Lk", "k", k.shape(dims.l));
}

// K and V come from the sessions; k and v, if present, are the rows to append.
Status Validator::CachedKeys(const Dims& dims) {
  if (problem_.packed) return InvalidArgument("layout is LHD (3), must be another with sessions");
  if (arrays_.size(ArrayField::kKvLengths) > 0) {
    return InvalidArgument("kv_lengths must be empty with sessions, which have lengths");
  }
  if (problem_.dropout > 0) {
    return InvalidArgument("dropout_p is " + NumberText(request_.dropout_p()) +
                           ", must be 0 with sessions");
  }
  const auto sessions = std::ssize(cache_->sequences());
  if (problem_.batch != sessions) {
    return InvalidArgument("sessions has " + std::to_string(sessions) +
                           " entries, must have B = " + std::to_string(problem_.batch));
  }
  const LayerShape& shape = cache_->shape();
  if (problem_.dtype != shape.dtype) {
    return InvalidArgument("q.dtype is " + Text(DTypeName(problem_.dtype)) +
                           ", must equal the sessions' " + Text(DTypeName(shape.dtype)));
  }
  const Text sessions_name = "the sessions";
  ATTEND_RETURN_IF_ERROR(MustAgree("q", request_.q(), dims.d, "D", sessions_name, shape.dim));
  if (out_.present[1]) {
    ATTEND_RETURN_IF_ERROR(
        MustAgree("k", request_.k(), dims.h, "Hkv", sessions_name, shape.heads_kv));
    ATTEND_RETURN_IF_ERROR(MustAgree("v", request_.v(), dims.d, "Dv", sessions_name, shape.dim_v));
    // Strides of the new rows in their message.
    SetStrides(out_.layout, shape.heads_kv, problem_.len_k, shape.dim, out_.attention.k);
    SetStrides(out_.layout, shape.heads_kv, problem_.len_k, shape.dim_v, out_.attention.v);
  }
  problem_.heads_kv = shape.heads_kv;
  problem_.dim_v = shape.dim_v;
  problem_.len_k = cache_->length_max();
  problem_.page_rows = cache_->layout().page_rows;
  return Status();
}

Status Validator::HeadArrays() {
  const int64_t heads = problem_.heads_q;
  const int64_t all_heads = heads * problem_.batch;
  const int64_t slopes = arrays_.size(ArrayField::kAlibiSlopes);
  if (slopes != 0 && slopes != heads && slopes != all_heads) {
    return WrongCount(
        "alibi_slopes", slopes,
        "Hq = " + std::to_string(heads) + ", B * Hq = " + std::to_string(all_heads) + ", or 0");
  }
  problem_.has_alibi = slopes > 0;
  out_.attention.alibi_stride_b = slopes > 0 && slopes != heads ? heads : 0;
  const int64_t sinks = arrays_.size(ArrayField::kSinks);
  if (sinks != 0 && sinks != heads) {
    return WrongCount("sinks", sinks, "Hq = " + std::to_string(heads) + ", or 0");
  }
  problem_.has_sinks = sinks > 0;
  return Status();
}

void Validator::Strides() {
  const Problem& p = problem_;
  Attention& a = out_.attention;
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  SetStrides(out_.layout, p.heads_q, rows_q, p.dim, a.q);
  if (cache_ == nullptr) {
    SetStrides(out_.layout, p.heads_kv, rows_k, p.dim, a.k);
    SetStrides(out_.layout, p.heads_kv, rows_k, p.dim_v, a.v);
  }
  SetStrides(out_.layout, p.heads_q, rows_q, p.dim_v, a.o);
  a.lse_stride_b = p.packed ? 0 : p.heads_q * rows_q;
  a.lse_stride_h = rows_q;
}

Status Validator::Bias() {
  if (!request_.has_bias()) return Status();
  const v1::Tensor& tensor = request_.bias();
  BiasView& view = out_.attention.bias;
  ATTEND_RETURN_IF_ERROR(CheckTensor("bias", tensor, 4, "[B or 1, Hq or 1, Lq or 1, Lk]",
                                     view.dtype, out_.tensor_bytes[3], Bits::kTaken));
  constexpr std::array<const char*, 4> kNames = {"B", "Hq", "Lq", "Lk"};
  const std::array<int64_t, 4> full = {problem_.batch, problem_.heads_q, problem_.len_q,
                                       problem_.len_k};
  for (int i = 0; i < 4; ++i) {
    const int64_t dim = tensor.shape(i);
    if (dim == full[i] || (i < 3 && dim == 1)) continue;
    return InvalidArgument("bias.shape[" + std::to_string(i) + "] is " + std::to_string(dim) +
                           ", must be " + kNames[i] + " = " + std::to_string(full[i]) +
                           (i < 3 ? " or 1" : ""));
  }
  const auto stride = [&](int i, int64_t step) { return tensor.shape(i) == 1 ? 0 : step; };
  const bool bits = view.dtype == DType::kBit;
  int64_t step = bits ? 8 * RowBytes(view.dtype, tensor.shape(3)) : tensor.shape(3);
  view.stride_q = stride(2, step);
  // The size in bytes (for bits: in bits) did not overflow, so these do not either, except for an
  // empty tensor, whose strides are unused.
  (void)__builtin_mul_overflow(step, tensor.shape(2), &step);
  view.stride_h = stride(1, step);
  (void)__builtin_mul_overflow(step, tensor.shape(1), &step);
  view.stride_b = stride(0, step);
  SetBias(view.dtype, &problem_);
  out_.present[3] = true;
  return Status();
}

}  // namespace

Status Validate(const v1::AttendRequest& request, const WireArrays& arrays, Validated& out,
                const CacheHold* cache) {
  return Validator(request, arrays, cache, out).Run();
}

}  // namespace attend
