// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/c_params.h"

namespace attend::test {
namespace {

attend_tensor Tensor(const void* data, int64_t b, int64_t h, int64_t l) {
  return {const_cast<void*>(data), b, h, l};
}

}  // namespace

attend_backward_params ToParams(const Attention& a, const Gradients& g) {
  const auto tensor = [](const TensorView& t) {
    return Tensor(t.data, t.stride_b, t.stride_h, t.stride_l);
  };
  attend_backward_params params = {};
  params.struct_bytes = sizeof(params);
  params.attention = ParamsOf(a);
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
