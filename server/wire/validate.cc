// SPDX-License-Identifier: Apache-2.0

#include "server/wire/validate.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "server/wire/validate_lengths.h"

namespace attend {
namespace {

using Text = std::string;

Text ShapeText(const v1::Tensor& tensor) {
  constexpr int kShown = 8;
  Text text = "[";
  for (int i = 0; i < std::min(tensor.shape_size(), kShown); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.shape(i));
  }
  return text + (tensor.shape_size() > kShown ? ", ...]" : "]");
}

Status WrongEnum(std::string_view field, int value, std::string_view allowed) {
  return InvalidArgument(Text(field) + " is " + std::to_string(value) + ", must be " +
                         Text(allowed));
}

// Fields 7 to 15 of Tensor are reserved for places of bytes that later servers may support.
Status CheckSource(const Text& name, const v1::Tensor& tensor) {
  const google::protobuf::UnknownFieldSet& unknown =
      v1::Tensor::GetReflection()->GetUnknownFields(tensor);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (number >= 7 && number <= 15) {
      return Unimplemented(name + ".source is field " + std::to_string(number) +
                           ", this server knows inline_bytes, chunked and shared_memory");
    }
  }
  return Status();
}

// Checks dtype, shape and byte length of one tensor by itself. Sets `bytes` to its size.
Status CheckTensor(const Text& name, const v1::Tensor& tensor, int rank, std::string_view dims,
                   DType& dtype, int64_t& bytes) {
  if (!IsDType(tensor.dtype())) {
    return WrongEnum(name + ".dtype", tensor.dtype(), "FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)");
  }
  dtype = static_cast<DType>(tensor.dtype());
  if (tensor.shape_size() != rank) {
    return InvalidArgument(name + ".shape " + ShapeText(tensor) + " has " +
                           std::to_string(tensor.shape_size()) + " dimensions, must have " +
                           std::to_string(rank) + ": " + Text(dims));
  }
  bytes = DTypeBytes(dtype);
  bool empty = false;
  bool overflow = false;
  for (int i = 0; i < rank; ++i) {
    const int64_t dim = tensor.shape(i);
    if (dim < 0) {
      return InvalidArgument(name + ".shape[" + std::to_string(i) + "] is " + std::to_string(dim) +
                             ", must be at least 0");
    }
    empty |= dim == 0;
    overflow |= __builtin_mul_overflow(bytes, dim, &bytes);
  }
  if (empty) {
    bytes = 0;
  } else if (overflow) {
    return InvalidArgument(name + ".shape " + ShapeText(tensor) + " times " +
                           std::to_string(DTypeBytes(dtype)) +
                           " bytes an element overflows 64 bits");
  }
  if (tensor.has_byte_length() && tensor.byte_length() != static_cast<uint64_t>(bytes)) {
    return InvalidArgument(name + ".byte_length is " + std::to_string(tensor.byte_length()) +
                           ", must be " + std::to_string(bytes) + " for shape " +
                           ShapeText(tensor) + " of " + Text(DTypeName(dtype)));
  }
  return CheckSource(name, tensor);
}

// Checks that shape[index] of `name`, which is `what`, equals that of the tensor `other`.
Status MustAgree(const Text& name, const v1::Tensor& tensor, int index, const Text& what,
                 const Text& other, int64_t expected) {
  if (tensor.shape(index) == expected) return Status();
  return InvalidArgument(name + ".shape[" + std::to_string(index) + "] (" + what + ") is " +
                         std::to_string(tensor.shape(index)) + ", must equal " + other + "'s " +
                         std::to_string(expected));
}

// The index of each dimension in a layout's shape; -1: none.
struct Dims {
  int rank;
  int b, h, l, d;
  std::string_view text_q, text_k, text_v;
};

constexpr Dims DimsOf(Layout layout) {
  switch (layout) {
    case Layout::kBlhd:
      return {4, 0, 2, 1, 3, "[B, Lq, Hq, D]", "[B, Lk, Hkv, D]", "[B, Lk, Hkv, Dv]"};
    case Layout::kLhd:
      return {3, -1, 1, 0, 2, "[q rows, Hq, D]", "[kv rows, Hkv, D]", "[kv rows, Hkv, Dv]"};
    case Layout::kBhld:
      break;
  }
  return {4, 0, 1, 2, 3, "[B, Hq, Lq, D]", "[B, Hkv, Lk, D]", "[B, Hkv, Lk, Dv]"};
}

// The strides of a dense tensor in `layout`. The sizes must have passed Check.
template <class View>
void SetStrides(Layout layout, int64_t heads, int64_t length, int64_t dim, View& view) {
  const bool heads_outside = layout == Layout::kBhld;
  view.stride_b = layout == Layout::kLhd ? 0 : heads * length * dim;
  view.stride_h = heads_outside ? length * dim : dim;
  view.stride_l = heads_outside ? dim : heads * dim;
}

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
      problem_.scale = 1.0f / std::sqrt(static_cast<float>(problem_.dim));
    }
    ATTEND_RETURN_IF_ERROR(Check(problem_));
    ATTEND_RETURN_IF_ERROR(HeadArrays());
    Strides();
    return Bias();
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
  out_.no_keys = cache_ != nullptr && !request_.has_k() && !request_.has_v();
  for (const auto& [name, present] :
       {std::pair{"q", request_.has_q()}, std::pair{"k", out_.no_keys || request_.has_k()},
        std::pair{"v", out_.no_keys || request_.has_v()}}) {
    if (!present) return InvalidArgument(Text(name) + " is not set, must be a tensor");
  }
  ATTEND_RETURN_IF_ERROR(
      CheckTensor("q", q, dims.rank, dims.text_q, problem_.dtype, out_.tensor_bytes[0]));
  ATTEND_RETURN_IF_ERROR(OutputDType());
  if (dims.b >= 0) problem_.batch = q.shape(dims.b);
  problem_.heads_q = q.shape(dims.h);
  problem_.dim = q.shape(dims.d);
  (problem_.packed ? problem_.total_q : problem_.len_q) = q.shape(dims.l);
  if (!out_.no_keys) ATTEND_RETURN_IF_ERROR(Keys(dims));
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
    if (dtype == problem_.dtype) continue;
    return InvalidArgument(Text(name) + ".dtype is " + Text(DTypeName(dtype)) +
                           ", must equal q.dtype " + Text(DTypeName(problem_.dtype)));
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

// K and V are the sessions', and k and v, if there are any, the rows that they are longer by.
Status Validator::CachedKeys(const Dims& dims) {
  if (problem_.packed) return InvalidArgument("layout is LHD (3), must be another with sessions");
  if (arrays_.size(ArrayField::kKvLengths) > 0) {
    return InvalidArgument("kv_lengths must be empty with sessions, which have lengths");
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
  if (!out_.no_keys) {
    ATTEND_RETURN_IF_ERROR(
        MustAgree("k", request_.k(), dims.h, "Hkv", sessions_name, shape.heads_kv));
    ATTEND_RETURN_IF_ERROR(MustAgree("v", request_.v(), dims.d, "Dv", sessions_name, shape.dim_v));
    // As the new rows are in their message.
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
                                     view.dtype, out_.tensor_bytes[3]));
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
  int64_t step = tensor.shape(3);
  view.stride_q = stride(2, step);
  // The bytes did not overflow, so these do not, unless the tensor is empty and they are unused.
  (void)__builtin_mul_overflow(step, tensor.shape(2), &step);
  view.stride_h = stride(1, step);
  (void)__builtin_mul_overflow(step, tensor.shape(1), &step);
  view.stride_b = stride(0, step);
  problem_.has_bias = true;
  out_.tensors = 4;
  return Status();
}

}  // namespace

Status Validate(const v1::AttendRequest& request, const WireArrays& arrays, Validated& out,
                const CacheHold* cache) {
  return Validator(request, arrays, cache, out).Run();
}

}  // namespace attend
