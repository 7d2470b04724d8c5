// SPDX-License-Identifier: Apache-2.0

#include "kernels/c/attend_c_params.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

namespace attend::c {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

ConstTensorView Const(const attend_tensor& t) {
  return {t.data, t.stride_b, t.stride_h, t.stride_l};
}

// float64 is accepted only if q's dtype is float64 as well.
Status CheckDType(const char* field, int32_t dtype, int32_t highest, const attend_params& params) {
  if (dtype == ATTEND_FLOAT64 && params.dtype == ATTEND_FLOAT64) return Status();
  return CheckRange(field, dtype, ATTEND_FLOAT16, highest);
}

Status CheckBias(const attend_params& params) {
  if (params.bias == nullptr) return Status();
  ATTEND_RETURN_IF_ERROR(CheckDType("bias_dtype", params.bias_dtype, ATTEND_BIT, params));
  if (params.bias_dtype != ATTEND_BIT) return Status();
  for (const auto& [name, stride] : {std::pair{"bias_stride_b", params.bias_stride_b},
                                     std::pair{"bias_stride_h", params.bias_stride_h},
                                     std::pair{"bias_stride_q", params.bias_stride_q}}) {
    if (stride % 8 == 0) continue;
    return InvalidArgument(std::string(name) + " is " + std::to_string(stride) +
                           ", must be a multiple of 8 for a bias of bits");
  }
  return Status();
}

Status ReadDropout(const attend_params& params, Problem* p) {
  const Result<int32_t> steps = DropoutSteps("dropout_p", static_cast<double>(params.dropout_p));
  if (!steps.ok()) return steps.status();
  p->dropout = *steps;
  constexpr int64_t kMost = UINT32_MAX;
  ATTEND_RETURN_IF_ERROR(CheckRange("dropout_sequence", params.dropout_sequence, 0, kMost));
  ATTEND_RETURN_IF_ERROR(CheckRange("dropout_head", params.dropout_head, 0, kMost));
  return CheckRange("dropout_row", params.dropout_row, 0, kMost);
}

void ReadScale(const attend_params& params, Problem* p) {
  p->scale = static_cast<float>(params.scale);
  p->softcap = static_cast<float>(params.softcap);
  // Not 0, which is off: it is refused.
  if (p->softcap == 0 && params.softcap != 0) p->softcap = std::numeric_limits<float>::denorm_min();
  if (p->dtype != DType::kFloat64) return;
  p->scale64 = params.scale;
  p->softcap64 = params.softcap;
}

uint64_t Step(const Dimension& d) {
  const auto stride = static_cast<uint64_t>(d.stride);
  return d.stride < 0 ? 0 - stride : stride;
}

}  // namespace

Status CheckRange(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + ", must be in [" +
                         std::to_string(low) + ", " + std::to_string(high) + "]");
}

Status CheckPackedStrides(std::initializer_list<std::pair<const char*, int64_t>> strides) {
  for (const auto& [name, stride] : strides) {
    if (stride == 0) continue;
    return InvalidArgument(std::string(name) + " is " + std::to_string(stride) +
                           ", must be 0 of packed sequences");
  }
  return Status();
}

Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected) {
  if (bytes == expected) return Status();
  return InvalidArgument("struct_bytes is " + std::to_string(bytes) + ", this library's " + name +
                         " has " + std::to_string(expected));
}

Status ReadProblem(const attend_params* params, Problem* p) {
  if (params == nullptr) return InvalidArgument("params is NULL");
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("attend_params", params->struct_bytes, sizeof(*params)));
  ATTEND_RETURN_IF_ERROR(CheckDType("dtype", params->dtype, ATTEND_FLOAT32, *params));
  if (params->o_dtype != 0 && params->o_dtype != params->dtype &&
      params->o_dtype != ATTEND_FLOAT32) {
    return InvalidArgument("o_dtype is " + std::to_string(params->o_dtype) + ", must be dtype " +
                           std::to_string(params->dtype) + " (or 0) or ATTEND_FLOAT32");
  }
  ATTEND_RETURN_IF_ERROR(
      CheckRange("alignment", params->alignment, ATTEND_BOTTOM_RIGHT, ATTEND_TOP_LEFT));
  ATTEND_RETURN_IF_ERROR(CheckBias(*params));
  ATTEND_RETURN_IF_ERROR(ReadDropout(*params, p));
  p->dtype = static_cast<DType>(params->dtype);
  p->o_float32 = params->o_dtype == ATTEND_FLOAT32;
  p->batch = params->batch;
  p->heads_q = params->heads_q;
  p->heads_kv = params->heads_kv;
  p->len_q = params->len_q;
  p->len_k = params->len_k;
  p->dim = params->dim;
  p->dim_v = params->dim_v;
  p->packed = params->packed != 0;
  p->total_q = params->total_q;
  p->total_k = params->total_k;
  p->page_rows = params->page_rows;
  p->mask.alignment = static_cast<Alignment>(params->alignment);
  p->mask.left = params->window_left;
  p->mask.right = params->window_right;
  p->key_offset = params->key_offset;
  p->keys_after = params->keys_after;
  ReadScale(*params, p);
  if (params->bias != nullptr) SetBias(static_cast<DType>(params->bias_dtype), p);
  p->has_alibi = params->alibi_slopes != nullptr;
  p->has_sinks = params->sinks != nullptr;
  p->return_lse = params->lse != nullptr;
  ATTEND_RETURN_IF_ERROR(Check(*p));
  if (!p->packed) return Status();
  return CheckPackedStrides({{"q.stride_b", params->q.stride_b},
                             {"k.stride_b", params->k.stride_b},
                             {"v.stride_b", params->v.stride_b},
                             {"o.stride_b", params->o.stride_b},
                             {"lse_stride_b", params->lse_stride_b}});
}

Status CheckMemory(const attend_params& params, const Problem& p) {
  const struct {
    const char* name;
    const void* data;
    int64_t elements;
  } tensors[] = {{"q", params.q.data, ElementsQ(p)},
                 {"k", params.k.data, ElementsK(p)},
                 {"v", params.v.data, ElementsV(p)},
                 {"o", params.o.data, ElementsO(p)}};
  for (const auto& tensor : tensors) {
    if (tensor.data == nullptr && tensor.elements > 0) {
      return InvalidArgument(std::string(tensor.name) + " is NULL, but has " +
                             std::to_string(tensor.elements) + " elements");
    }
  }
  if (p.packed && (params.q_offsets == nullptr || params.kv_offsets == nullptr)) {
    return InvalidArgument("packed needs q_offsets and kv_offsets, one is NULL");
  }
  if (p.page_rows > 0 && params.kv_pages == nullptr) {
    return InvalidArgument("kv_pages is NULL, but page_rows is " + std::to_string(p.page_rows));
  }
  return Status();
}

Status CheckDistinct(const char* name, const std::array<Dimension, 3>& outer, int64_t columns) {
  std::array<Dimension, 3> rising = outer;
  std::sort(rising.begin(), rising.end(),
            [](const Dimension& a, const Dimension& b) { return Step(a) < Step(b); });
  if (rising[0].size == 0 || rising[1].size == 0 || rising[2].size == 0) return Status();
  auto span = static_cast<uint64_t>(columns);
  for (const Dimension& d : rising) {
    if (d.size == 1) continue;
    uint64_t more = 0;
    const bool apart = Step(d) >= span;  // steps over everything that the smaller strides span
    if (apart && !__builtin_mul_overflow(Step(d), static_cast<uint64_t>(d.size - 1), &more) &&
        !__builtin_add_overflow(span, more, &span)) {
      continue;
    }
    return InvalidArgument(std::string(name) + " has strides " + std::to_string(outer[0].stride) +
                           ", " + std::to_string(outer[1].stride) + " and " +
                           std::to_string(outer[2].stride) +
                           ", by which it may overlap itself: each must step over all that the "
                           "smaller ones reach");
  }
  return Status();
}

Status CheckOutputs(const attend_params& params, const Problem& p) {
  const int64_t batch = p.packed ? 1 : p.batch;
  const int64_t rows = p.packed ? p.total_q : p.len_q;
  const attend_tensor& o = params.o;
  ATTEND_RETURN_IF_ERROR(CheckDistinct(
      "o", {{{batch, o.stride_b}, {p.heads_q, o.stride_h}, {rows, o.stride_l}}}, p.dim_v));
  if (params.lse == nullptr || rows == 0) return Status();
  return CheckDistinct(
      "lse", {{{batch, params.lse_stride_b}, {p.heads_q, params.lse_stride_h}, {1, rows}}}, rows);
}

Attention ReadAttention(const attend_params& params, const Problem& p) {
  Attention a;
  a.problem = p;
  a.q = Const(params.q);
  a.k = Const(params.k);
  a.v = Const(params.v);
  a.o = {params.o.data, params.o.stride_b, params.o.stride_h, params.o.stride_l};
  a.lse = params.lse;
  a.lse_stride_b = params.lse_stride_b;
  a.lse_stride_h = params.lse_stride_h;
  a.bias.data = params.bias;
  if (p.has_bias) a.bias.dtype = static_cast<DType>(params.bias_dtype);
  a.bias.stride_b = params.bias_stride_b;
  a.bias.stride_h = params.bias_stride_h;
  a.bias.stride_q = params.bias_stride_q;
  a.alibi_slopes = params.alibi_slopes;
  a.alibi_stride_b = params.alibi_stride_b;
  a.sinks = params.sinks;
  a.q_lengths = params.q_lengths;
  a.kv_lengths = params.kv_lengths;
  a.q_offsets = params.q_offsets;
  a.kv_offsets = params.kv_offsets;
  a.kv_pages = {params.kv_pages, params.kv_pages_stride};
  a.dropout = {params.dropout_seed, params.dropout_sequence, params.dropout_head,
               params.dropout_row};
  return a;
}

Status CheckWorkspace(const void* workspace, int64_t bytes, int64_t needed) {
  if (needed > 0 && (workspace == nullptr || bytes < needed)) {
    return InvalidArgument("workspace_bytes is " + std::to_string(bytes) +
                           (workspace == nullptr ? " at NULL" : "") + ", must be at least " +
                           std::to_string(needed));
  }
  const uintptr_t beyond = reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment;
  if (needed > 0 && beyond != 0) {
    return InvalidArgument("workspace is " + std::to_string(beyond) + " bytes past a multiple of " +
                           std::to_string(kWorkspaceAlignment) + ", must be aligned to it");
  }
  return Status();
}

}  // namespace attend::c
