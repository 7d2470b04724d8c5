// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/c_params.h"

namespace attend::test {
namespace {

attend_tensor Tensor(const void* data, int64_t b, int64_t h, int64_t l) {
  return {const_cast<void*>(data), b, h, l};
}

}  // namespace

attend_params ToParams(const Attention& a) {
  const Problem& p = a.problem;
  attend_params params = {};
  params.struct_bytes = sizeof(params);
  params.dtype = static_cast<int32_t>(p.dtype);
  params.o_dtype = static_cast<int32_t>(p.o_dtype());
  params.batch = p.batch;
  params.heads_q = p.heads_q;
  params.heads_kv = p.heads_kv;
  params.len_q = p.len_q;
  params.len_k = p.len_k;
  params.dim = p.dim;
  params.dim_v = p.dim_v;
  params.packed = p.packed;
  params.alignment = static_cast<int32_t>(p.mask.alignment);
  params.total_q = p.total_q;
  params.total_k = p.total_k;
  params.window_left = p.mask.left;
  params.window_right = p.mask.right;
  params.key_offset = p.key_offset;
  params.keys_after = p.keys_after;
  params.scale = ExactScale(p);
  params.softcap = ExactSoftcap(p);
  params.q = Tensor(a.q.data, a.q.stride_b, a.q.stride_h, a.q.stride_l);
  params.k = Tensor(a.k.data, a.k.stride_b, a.k.stride_h, a.k.stride_l);
  params.v = Tensor(a.v.data, a.v.stride_b, a.v.stride_h, a.v.stride_l);
  params.o = Tensor(a.o.data, a.o.stride_b, a.o.stride_h, a.o.stride_l);
  params.lse = a.lse;
  params.lse_stride_b = a.lse_stride_b;
  params.lse_stride_h = a.lse_stride_h;
  params.bias = a.bias.data;
  params.bias_stride_b = a.bias.stride_b;
  params.bias_stride_h = a.bias.stride_h;
  params.bias_stride_q = a.bias.stride_q;
  params.bias_dtype = static_cast<int32_t>(a.bias.dtype);
  params.config = -1;
  params.alibi_slopes = a.alibi_slopes;
  params.alibi_stride_b = a.alibi_stride_b;
  params.sinks = a.sinks;
  params.q_lengths = a.q_lengths;
  params.kv_lengths = a.kv_lengths;
  params.q_offsets = a.q_offsets;
  params.kv_offsets = a.kv_offsets;
  params.kv_pages = a.kv_pages.pages;
  params.kv_pages_stride = a.kv_pages.stride;
  params.page_rows = p.page_rows;
  params.dropout_p = static_cast<float>(p.dropout) / kDropoutOne;
  params.dropout_seed = a.dropout.seed;
  params.dropout_sequence = a.dropout.sequence;
  params.dropout_head = a.dropout.head;
  params.dropout_row = a.dropout.row;
  return params;
}

attend_backward_params ToParams(const Attention& a, const Gradients& g) {
  const auto tensor = [](const TensorView& t) {
    return Tensor(t.data, t.stride_b, t.stride_h, t.stride_l);
  };
  attend_backward_params params = {};
  params.struct_bytes = sizeof(params);
  params.attention = ToParams(a);
  params.d_o = Tensor(g.d_o.data, g.d_o.stride_b, g.d_o.stride_h, g.d_o.stride_l);
  params.d_lse = g.d_lse;
  params.d_q = tensor(g.d_q);
  params.d_k = tensor(g.d_k);
  params.d_v = tensor(g.d_v);
  params.d_bias = static_cast<float*>(g.d_bias.data);
  params.d_bias_stride_b = g.d_bias.stride_b;
  params.d_bias_stride_h = g.d_bias.stride_h;
  params.d_bias_stride_q = g.d_bias.stride_l;
  params.d_sinks = g.d_sinks;
  return params;
}

}  // namespace attend::test
