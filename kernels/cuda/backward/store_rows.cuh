// SPDX-License-Identifier: Apache-2.0
//
// Stores gradients from the Tensor Core kernels of the backward pass. Device code; all lanes of a
// warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/mma.cuh"

namespace attend::cuda::backward {

// Whether one of two packed elements is NaN or Inf.
template <bool kBfloat16>
__device__ __forceinline__ bool NonFinitePair(uint32_t pair) {
  constexpr uint32_t kLow = kBfloat16 ? 0x7f80 : 0x7c00;
  constexpr uint32_t kHigh = kLow << 16;
  return (pair & kLow) == kLow || (pair & kHigh) == kHigh;
}

// Adds 0 times a pair, which is NaN if the element is NaN or Inf.
template <bool kBfloat16>
__device__ __forceinline__ void AddNothing(uint32_t pair, uint32_t& sum) {
  if constexpr (kBfloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  }
}

// Stores a warp's 16 rows of a gradient, times `factor`: rows below `count` exist, and those from
// `length` on get zeros. `sums`: the thread's part of rows `row` and `row` + 8, in accumulator
// layout. kEights: dim is known to be a multiple of 8, which saves registers. Returns whether an
// element is NaN or Inf as stored, which Fp32Redo looks for.
template <int kD, bool kBfloat16, bool kEights>
__device__ __forceinline__ bool StoreRows(const float* sums, float factor, uint16_t* to,
                                          int64_t stride, int row, int length, int count, int dim) {
  const int lane = threadIdx.x % 32;
  const bool vectors =
      reinterpret_cast<uint64_t>(to) % 16 == 0 && stride % 8 == 0 && (kEights || dim % 8 == 0);
  uint32_t found = 0;  // a pair
#pragma unroll
  for (int block = 0; block < kD / 8; block += 4) {
    uint32_t x[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool counts = row + 8 * r < length;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = sums + 4 * (block + i) + 2 * r;
        x[r][i] = counts ? PackPair<kBfloat16>(pair[0] * factor, pair[1] * factor) : 0;
        AddNothing<kBfloat16>(x[r][i], found);
      }
      TransposeQuad(x[r], lane);
    }
    const int col = 8 * (block + lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= count || col >= dim) continue;
      uint16_t* const at = to + (row + 8 * r) * stride + col;
      if (vectors) {
        *reinterpret_cast<uint4*>(at) = make_uint4(x[r][0], x[r][1], x[r][2], x[r][3]);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kEights || col + 2 * i < dim) at[2 * i] = static_cast<uint16_t>(x[r][i]);
        if (kEights || col + 2 * i + 1 < dim) at[2 * i + 1] = static_cast<uint16_t>(x[r][i] >> 16);
      }
    }
  }
  return NonFinitePair<kBfloat16>(found);
}

}  // namespace attend::cuda::backward
