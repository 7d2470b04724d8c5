// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80 after the last key tile: normalises, writes O and LSE. Device code; all lanes of
// a warp call each function together, independently of other warps.

#pragma once

#include <cstdint>

#include "kernels/contract/softmax_state.h"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm80/softmax.cuh"
#include "kernels/cuda/sm80/stored_rows.cuh"

namespace attend::cuda::sm80 {

// Final state of the thread's row `r`.
template <class T, bool kGeneral>
__device__ __forceinline__ RowEnd EndRow(const BlockWork& work, const RowState<T>& state, int r) {
  RowEnd end;
  const float sum = QuadSum(state.sum[r]);
  if constexpr (kGeneral) {
    const float reference = IsFar(state.base[r]) ? Reference<T>(r) : 0.0f;
    const FinishedRow finished = FinishBase(state.base[r], reference, sum, work.to_log2);
    end.state = finished.state;
    end.unit = finished.unit;
  } else {
    if (state.base[r] != kNoBase) end.state.max = state.base[r] * kLn2;
    end.state.sum = sum;
    end.marked = state.base[r] == kMarkedBase;
  }
  end.largest = LargestOfRow<T::kDim / 8>([&](int j) { return state.output[r / 2][j]; }, r % 2);
  end.counts = RowOf<T>(work, r) < work.q_len && state.base[r] != kNoBase;
  return end;
}

// Writes the warp's rows, all of which exist, in 16-byte chunks. All reads precede all writes,
// because the compiler cannot prove that they do not alias.
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

// Writes the warp's rows from shared memory, where they have the layout of a tile of Q.
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

// Stores a row of fp32 output from its quad of lanes. `o`: this lane's elements.
template <class T>
__device__ __forceinline__ void StoreFloats(const BlockWork& work, int row,
                                            const float (&o)[T::kDim / 8][4], int half,
                                            float factor) {
  float* const to = reinterpret_cast<float*>(work.o + row * work.o_stride);
  const int dim = row < work.q_rows ? work.v.dim : 0;
  const int first = ThreadIndex() % 4 * 2;
#pragma unroll
  for (int j = 0; j < T::kDim / 8; ++j) {
    const int col = 8 * j + first;
    // Padding rows are 0 even if their computed output is not finite.
    if (col < dim) to[col] = row < work.q_len ? o[j][2 * half] * factor : 0.0f;
    if (col + 1 < dim) to[col + 1] = row < work.q_len ? o[j][2 * half + 1] * factor : 0.0f;
  }
}

// Normalises slice `m` and writes its LSE. Its rows of O go to `query`, or directly to global
// memory in fp32.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ void StoreSlice(BlockWork& work, int m, char* query,
                                           RowState<T>& state) {
  const int lane = ThreadIndex() % 32;
  const RowEnd ends[2] = {EndRow<T, kGeneral>(work, state, 2 * m),
                          EndRow<T, kGeneral>(work, state, 2 * m + 1)};
  bool marked = false;
  if (__builtin_expect(AnyToRepair(ends, &marked), 0)) {
    const int slice = WarpPlace(work) * T::kSlices + m;
    if (lane == 0) atomicOr(&work.asked, (marked ? 0x10001u : 1u) << slice);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = RowOf<T>(work, 2 * m + half);
    SoftmaxState<float> total;
    float factor = 0.0f;
    if (row < work.q_len) {
      total = ends[half].state;
      factor = OutputFactor(total, ends[half].unit, work.has_sink, work.sink);
      factor = KeepFinite<!std::is_same_v<Element, __half>>(factor, ends[half].largest);
      if constexpr (T::kDropout) factor *= DropoutScale(work.attention->problem.dropout);
    }
    if (work.o_float32) StoreFloats<T>(work, row, state.output[m], half, factor);
    char* staged = query + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < T::kDim / 8 && !work.o_float32; ++j) {
      const float* o = &state.output[m][j][half * 2];
      // Padding rows are 0 even if their computed output is not finite.
      const uint32_t pair = row < work.q_len ? Pack<Element>(o[0] * factor, o[1] * factor) : 0;
      *reinterpret_cast<uint32_t*>(staged + T::Row::Offset(m * 16 + half * 8 + lane / 4, j)) = pair;
    }
    if (work.lse != nullptr && lane % 4 == 0 && row < work.q_rows) {
      work.lse[row] = LogSumExp(total);
    }
  }
}

// Normalises, writes O and LSE. The warp's part of Q's memory, which no other warp reads, is used
// to turn fragments into whole rows.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ void StoreOutput(BlockWork& work, char* query, RowState<T>& state) {
  __syncwarp();  // all lanes have read Q
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) StoreSlice<T, Element, kGeneral>(work, m, query, state);
  if (work.o_float32) return;
  __syncwarp();
  CopyOut<T>(work, query);
}

// Repairs a tile's slices that need it; all threads of the block.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ void RepairTile(const BlockWork& work) {
  using Rows = StoredRows<Element, T::kDim / 8, kGeneral, T::kPaged, T::kDropout>;
#pragma unroll 1
  for (int m = 0; m < T::kSlices; ++m) {
    const uint32_t asked = work.asked >> (WarpPlace(work) * T::kSlices + m);
    if ((asked & 1) == 0) continue;
    const bool marked = (asked >> 16 & 1) != 0;
    const int row = WarpRow<T>(work) + 16 * m;
    RepairRows<Rows>(*work.attention, work.b, work.h, row, marked);
  }
  __syncthreads();  // `work` is reused afterwards
}

}  // namespace attend::cuda::sm80
