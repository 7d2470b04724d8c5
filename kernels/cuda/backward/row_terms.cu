// SPDX-License-Identifier: Apache-2.0
//
// What the backward pass needs of each query row, and the gradients of sinks, which need nothing
// else.

#include <algorithm>

#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kBlocksMax = 1 << 20;

template <class T>
__device__ __forceinline__ T WarpSum(T x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// A warp for each row, and then for another.
__global__ void __launch_bounds__(kThreads) RowTerms(const __grid_constant__ BackwardPass pass) {
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const int lane = threadIdx.x % 32;
  const int64_t rows = p.batch * p.heads_q * p.len_q;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; at < rows;
       at += warps) {
    const int64_t i = at % p.len_q;
    const int64_t h = at / p.len_q % p.heads_q;
    const int64_t b = at / p.len_q / p.heads_q;
    const Sequence s = SequenceOf(a, b);
    if (i >= s.q_len) continue;
    const int64_t row = s.q_row + i;
    const int64_t o = b * a.o.stride_b + h * a.o.stride_h + row * a.o.stride_l;
    const ConstTensorView& d_o = pass.gradients.d_o;
    const int64_t other = b * d_o.stride_b + h * d_o.stride_h + row * d_o.stride_l;
    float less = 0.0f;
    for (int64_t d = lane; d < p.dim_v; d += 32) {
      less +=
          LoadGlobal(a.o.data, p.o_dtype(), o + d) * LoadGlobal(d_o.data, p.o_dtype(), other + d);
    }
    less = WarpSum(less);
    const int64_t in_lse = b * a.lse_stride_b + h * a.lse_stride_h + row;
    if (pass.gradients.d_lse != nullptr) less -= pass.gradients.d_lse[in_lse];
    if (lane != 0) continue;
    const float lse = a.lse[in_lse];
    const int64_t term = TermIndex(p, s, b, h, i);
    pass.less[term] = less;
    pass.lse[term] = lse == NegativeInfinity() ? INFINITY : lse * pass.lse_unit;
  }
}

// A block for each head; threads take rows in turn, and their sums are added in one order. In
// double: there are few terms, and they may be of any size.
__global__ void __launch_bounds__(kThreads)
    SinkGradients(const __grid_constant__ BackwardPass pass) {
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const int64_t h = blockIdx.x;
  const auto sink = static_cast<double>(a.sinks[h]);
  double sum = 0.0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t i = threadIdx.x; i < s.q_len; i += kThreads) {
      const double lse = a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i];
      if (isinf(sink) || isinf(lse)) continue;
      sum -= exp(sink - lse) * pass.less[TermIndex(p, s, b, h, i)];
    }
  }
  __shared__ double sums[kWarps];
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int n = 1; n < kWarps; ++n) sum += sums[n];
  pass.gradients.d_sinks[h] = static_cast<float>(sum);
}

}  // namespace

cudaError_t LaunchRowTerms(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  const int64_t rows = p.batch * p.heads_q * p.len_q;
  if (rows == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>((rows + kWarps - 1) / kWarps, kBlocksMax);
  RowTerms<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(pass);
  return cudaGetLastError();
}

cudaError_t LaunchSinkGradients(const BackwardPass& pass, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(pass.attention.problem.heads_q);
  if (heads == 0 || pass.gradients.d_sinks == nullptr) return cudaSuccess;
  SinkGradients<<<heads, kThreads, 0, stream>>>(pass);
  return cudaGetLastError();
}

}  // namespace attend::cuda
