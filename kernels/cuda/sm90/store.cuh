// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, storing O from registers: a consumer thread has two rows, 8 apart, whose columns
// a quad shares. Device code; the lanes of a warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

template <bool kBfloat16, int kOutputs>
__device__ __forceinline__ uint32_t OutputPair(const float (&output)[kOutputs], int block, int r) {
  return PackPair<kBfloat16>(output[4 * block + 2 * r], output[4 * block + 2 * r + 1]);
}

// Stores 16 bytes per lane.
template <bool kBfloat16, int kOutputs>
__device__ __forceinline__ void StoreVectors(const Sm90Work& work, int row, int lane,
                                             const float (&output)[kOutputs]) {
  const int col = 8 * (lane % 4);
  uint16_t* o = work.o + row * work.o_stride + col;
  const int64_t eight_rows = 8 * work.o_stride;
  const int upper = row < work.q_rows ? work.dim_v - col : 0;  // columns from here on
  const int lower = row + 8 < work.q_rows ? work.dim_v - col : 0;
#pragma unroll
  for (int block = 0; block < kOutputs / 4; block += 4) {
    uint32_t x[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[r][i] = OutputPair<kBfloat16>(output, block + i, r);
      TransposeQuad(x[r], lane);
    }
    if (8 * block < upper) {
      *reinterpret_cast<uint4*>(o + 8 * block) = make_uint4(x[0][0], x[0][1], x[0][2], x[0][3]);
    }
    if (8 * block < lower) {
      *reinterpret_cast<uint4*>(o + eight_rows + 8 * block) =
          make_uint4(x[1][0], x[1][1], x[1][2], x[1][3]);
    }
  }
}

// Stores O in float32: two floats per lane, or one where rows are not 8-byte aligned. `work` counts
// elements from O's base as if they had 16 bits.
template <int kOutputs>
__device__ __forceinline__ void StoreFloats(const Sm90Work& work, int row, int lane,
                                            const float (&output)[kOutputs]) {
  void* const base = work.attention->o.data;
  float* const first = static_cast<float*>(base) + (work.o - static_cast<uint16_t*>(base));
  const bool pairs =
      (reinterpret_cast<uint64_t>(first) % 8 | work.o_stride % 2 | work.dim_v % 2) == 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int mine = row + 8 * r;
    float* const o = first + mine * work.o_stride + 2 * (lane % 4);
    const int left = mine < work.q_rows ? work.dim_v - 2 * (lane % 4) : 0;  // columns from there on
#pragma unroll
    for (int block = 0; block < kOutputs / 4; ++block) {
      const float2 pair = {output[4 * block + 2 * r], output[4 * block + 2 * r + 1]};
      if (pairs) {
        if (8 * block < left) *reinterpret_cast<float2*>(o + 8 * block) = pair;
        continue;
      }
      if (8 * block < left) o[8 * block] = pair.x;
      if (8 * block + 1 < left) o[8 * block + 1] = pair.y;
    }
  }
}

// Element by element, for rows that are not 16-byte aligned.
template <bool kBfloat16, int kOutputs>
__device__ __forceinline__ void StoreElements(const Sm90Work& work, int row, int lane,
                                              const float (&output)[kOutputs]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int mine = row + 8 * r;
    const int dim = mine < work.q_rows ? work.dim_v : 0;
    uint16_t* o = work.o + mine * work.o_stride;
#pragma unroll
    for (int block = 0; block < kOutputs / 4; ++block) {
      const uint32_t pair = OutputPair<kBfloat16>(output, block, r);
      const int col = 8 * block + 2 * (lane % 4);
      if (col < dim) o[col] = static_cast<uint16_t>(pair);
      if (col + 1 < dim) o[col + 1] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

}  // namespace attend::cuda
