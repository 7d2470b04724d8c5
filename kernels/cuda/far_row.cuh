// SPDX-License-Identifier: Apache-2.0
//
// A far row (exponent_base.cuh) of a kernel whose tiles cannot hold its scores: computed again, key
// by key on CUDA cores, from global memory. Some forty times the instructions of a tile's rows.
// Scores beyond 2^24 have such rows: of huge Q and K, a huge scale or softcap. Device code.

#pragma once

#include "kernels/cuda/device_math.cuh"
#include "kernels/limits.h"
#include "kernels/problem.h"
#include "kernels/softmax_state.h"

namespace attend::cuda {

template <bool kBfloat16>
__device__ __forceinline__ float LoadNarrow(const uint16_t* at) {
  return Widen(kBfloat16 ? DType::kBFloat16 : DType::kFloat16, *at);
}

__device__ __forceinline__ const uint16_t* RowAt(const ConstTensorView& t, int64_t b, int64_t h,
                                                 int64_t row) {
  return static_cast<const uint16_t*>(t.data) + b * t.stride_b + h * t.stride_h + row * t.stride_l;
}

// Row i of sequence b, query head h, of an attention without bias and ALiBi. Called by the row's
// four lanes alone, each with O's columns 8 * n + 2 * (lane % 4) and the next, n < kBlocks: `at(n)`
// is where their sums go, two floats. Not divided yet.
template <bool kBfloat16, int kBlocks, class At>
__device__ __forceinline__ SoftmaxState<float> ComputeFarRow(const Attention& a, int b, int h,
                                                             int i, const At& at) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  const KeyRange keys = VisibleKeys(p.mask, s, i);
  const int kv_head = h / static_cast<int>(p.group());
  const int column = 2 * (threadIdx.x % 4);
  const unsigned quad = 0xfu << (threadIdx.x & 28);
  const uint16_t* const q = RowAt(a.q, b, h, s.q_row + i);
  const uint16_t* k = RowAt(a.k, b, kv_head, s.k_row + keys.begin);
  const uint16_t* v = RowAt(a.v, b, kv_head, s.k_row + keys.begin);
  SoftmaxState<float> state;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) at(n)[0] = at(n)[1] = 0.0f;
#pragma unroll 1
  for (int left = static_cast<int>(keys.end - keys.begin); left > 0; --left) {
    float score = 0.0f;
#pragma unroll 1
    for (int d = column; d < p.dim; d += d % 2 == 0 ? 1 : 7) {
      score = fmaf(LoadNarrow<kBfloat16>(q + d), LoadNarrow<kBfloat16>(k + d), score);
    }
    score += __shfl_xor_sync(quad, score, 1);
    score += __shfl_xor_sync(quad, score, 2);
    score *= p.scale;
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (score != NegativeInfinity()) {  // else no weight, whatever the value
      float rescale = 1.0f;
      if (!(score <= state.max)) {  // NaN too, which stays
        rescale = WeightAgainst(state.max, score, kLog2E);
        state.max = score;
      }
      const float weight = WeightAgainst(score, state.max, kLog2E);
      state.sum = fmaf(state.sum, rescale, weight);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = 8 * n + column + e;
          if (d < p.dim_v) {
            at(n)[e] = fmaf(at(n)[e], rescale, weight * LoadNarrow<kBfloat16>(v + d));
          }
        }
      }
    }
    k += a.k.stride_l;
    v += a.v.stride_l;
  }
  return state;
}

}  // namespace attend::cuda
