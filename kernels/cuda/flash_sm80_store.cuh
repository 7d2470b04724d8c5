// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80 behind the last tile of keys: divides, writes O and LSE. Device code; a warp
// calls each function together and needs no other.

#pragma once

#include <cstdint>

#include "kernels/cuda/far_row.cuh"
#include "kernels/cuda/flash_sm80_softmax.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/softmax_state.h"

namespace attend::cuda::sm80 {

// The largest scores of a plain kernel's rows; those that tiles cannot hold are computed again.
template <class T, class Element>
__device__ __forceinline__ void FindMaxima(const BlockWork& work, RowState<T>& state,
                                           float (&max)[T::kThreadRows]) {
  bool marked = false;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    max[r] = state.base[r] == kNoBase ? NegativeInfinity() : state.base[r] * kLn2;
    marked |= state.base[r] == kMarkedBase;
  }
  if (__builtin_expect(!__any_sync(0xffffffffu, marked), 1)) return;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = RowOf<T>(work, r);
    if (state.base[r] != kMarkedBase || row >= work.q_len) continue;
    const SoftmaxState<float> softmax =
        ComputeFarRow<!std::is_same_v<Element, __half>, T::kDim / 8>(
            *work.attention, work.b, work.h, row,
            [&](int n) { return &state.output[r / 2][n][r % 2 * 2]; });
    max[r] = softmax.max;
    state.sum[r] = threadIdx.x % 4 == 0 ? softmax.sum : 0.0f;  // the lanes' will be joined
  }
}

// Joins the lanes' sums, adds the sink; what the thread's row `r` is multiplied by.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ float FinishRow(const BlockWork& work, int r, float max,
                                           const RowState<T>& state, SoftmaxState<float>& total) {
  float sum = state.sum[r];
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  const int row = RowOf<T>(work, r);
  if (row >= work.q_len) return 0.0f;
  float unit = 1.0f;
  if constexpr (kGeneral) {
    const float reference = IsFar(state.base[r]) ? Reference<T>(r) : 0.0f;
    const FinishedRow finished = FinishBase(state.base[r], reference, sum, work.to_log2);
    total = finished.state;
    unit = finished.unit;
  } else {
    total.max = max;
    total.sum = sum;
  }
  float largest[2] = {};
#pragma unroll
  for (int j = 0; j < T::kDim / 8; ++j) {
    const float* o = &state.output[r / 2][j][r % 2 * 2];
    largest[0] = fmaxf(largest[0], fabsf(o[0]));
    largest[1] = fmaxf(largest[1], fabsf(o[1]));
  }
  return KeepFinite<!std::is_same_v<Element, __half>>(
      OutputFactor(total, unit, work.has_sink, work.sink), fmaxf(largest[0], largest[1]));
}

// Writes the warp's rows, all of which exist, in 16-byte chunks. Everything is read before anything
// is written: the compiler cannot know that they are different memories.
template <class T>
__device__ __forceinline__ void CopyOutWhole(char* o, int64_t stride, const char* staged) {
  using Row = typename T::Row;
  constexpr int kPassRows = 32 / Row::kSpan;
  constexpr int kPasses = T::kWarpRows / kPassRows;
  const int row = threadIdx.x % 32 / Row::kSpan;
  const int chunk = threadIdx.x % Row::kSpan;
  o += row * stride + 16 * chunk;
#pragma unroll
  for (int span = 0; span < T::kPassSpans; ++span) {
    uint4 v[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      v[pass] = *reinterpret_cast<const uint4*>(
          staged + Row::Offset(row + pass * kPassRows, chunk + span * Row::kSpan));
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      *reinterpret_cast<uint4*>(o + pass * kPassRows * stride + 16 * span * Row::kSpan) = v[pass];
    }
  }
}

// Writes the warp's rows from shared memory, which they have reached as a tile of Q lies.
template <class T>
__device__ __forceinline__ void CopyOut(const BlockWork& work, const char* staged) {
  using Row = typename T::Row;
  const int lane = threadIdx.x % 32;
  const int warp_row = WarpRow<T>(work);
  const int dim = work.v.dim;
  const int64_t stride = work.o_stride;
  char* o = work.o + warp_row * stride;
  const bool fast = work.o_fast;
  if (fast && dim == T::kDim && warp_row + T::kWarpRows <= work.q_rows) {
    CopyOutWhole<T>(o, stride, staged);
    return;
  }
#pragma unroll 1
  for (int row = lane / Row::kSpan; row < T::kWarpRows; row += 32 / Row::kSpan) {
    if (warp_row + row >= work.q_rows) return;
#pragma unroll 1
    for (int chunk = lane % Row::kSpan; 8 * chunk < dim; chunk += Row::kSpan) {
      const char* from = staged + Row::Offset(row, chunk);
      char* to = o + row * stride + 16 * chunk;
      if (fast) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        continue;
      }
      for (int e = 0; e < min(8, dim - 8 * chunk); ++e) {
        reinterpret_cast<uint16_t*>(to)[e] = reinterpret_cast<const uint16_t*>(from)[e];
      }
    }
  }
}

// Divides, writes O and LSE. The warp's part of Q's memory, which no other warp reads, serves to
// turn fragments into whole rows.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ void StoreOutput(const BlockWork& work, char* query,
                                            RowState<T>& state) {
  const int lane = threadIdx.x % 32;
  float* const lse_rows = work.lse;
  __syncwarp();  // all lanes have read Q
  float max[T::kThreadRows] = {};
  if constexpr (!kGeneral) FindMaxima<T, Element>(work, state, max);
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = RowOf<T>(work, r);
    SoftmaxState<float> total;
    const float factor = FinishRow<T, Element, kGeneral>(work, r, max[r], state, total);
    char* staged = query + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < T::kDim / 8; ++j) {
      const float* o = &state.output[r / 2][j][r % 2 * 2];
      // Padding rows are 0 even if what was computed for them is not finite.
      const uint32_t pair = row < work.q_len ? Pack<Element>(o[0] * factor, o[1] * factor) : 0;
      *reinterpret_cast<uint32_t*>(staged + T::Row::Offset(r / 2 * 16 + r % 2 * 8 + lane / 4, j)) =
          pair;
    }
    if (lse_rows != nullptr && lane % 4 == 0 && row < work.q_rows) {
      lse_rows[row] = LogSumExp(total);
    }
  }
  __syncwarp();
  CopyOut<T>(work, query);
}

}  // namespace attend::cuda::sm80
