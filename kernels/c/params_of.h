// SPDX-License-Identifier: Apache-2.0
//
// The C struct of an attention, for callers of the C interface that have the C++ description: the
// reverse of attend_c_params.h. Any thread.

#pragma once

#include "kernels/c/attend_c.h"
#include "kernels/contract/problem.h"

namespace attend {

// Pointers are as they are; on device 0, no kernel named and no workspace.
inline attend_params ParamsOf(const Attention& a) {
  const Problem& p = a.problem;
  const auto tensor = [](const auto& view) {
    return attend_tensor{const_cast<void*>(static_cast<const void*>(view.data)), view.stride_b,
                         view.stride_h, view.stride_l};
  };
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
  params.softcap = ExactCap(p).value;
  params.q = tensor(a.q);
  params.k = tensor(a.k);
  params.v = tensor(a.v);
  params.o = tensor(a.o);
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

}  // namespace attend
