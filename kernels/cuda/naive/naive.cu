// SPDX-License-Identifier: Apache-2.0
//
// cuda_naive: standard attention in three kernels, with the whole score matrix in memory. The first
// rung of the ladder: what FlashAttention is measured against, written to be read.
//
//   ScoreKernel    S = scale * Q K^T, capped, biased, masked          [B, Hq, Lq, Lk] floats
//   SoftmaxKernel  P = softmax(S) in place, dropped, LSE               one warp per row
//   OutputKernel   O = P V
//
// Scores and outputs are tiled matrix products: a block of 16 x 16 threads computes a 64 x 64 tile,
// 4 x 4 elements per thread, from slices of 16 that pass through shared memory.

#include "kernels/cuda/naive/naive.h"

#include <algorithm>
#include <cstdint>

#include "kernels/contract/softmax_state.h"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"

namespace attend::cuda {
namespace {

// Grids are one-dimensional; work beyond CUDA's limit of blocks is split over several launches.
constexpr int64_t kGridBlocksMax = INT32_MAX;
constexpr int kTile = 64;   // rows and columns of a block's tile
constexpr int kSlice = 16;  // depth of a slice
constexpr int kEdge = 16;   // threads per edge of a block; 4 x 4 elements each
constexpr int kThreads = kEdge * kEdge;
constexpr int kWarpsPerBlock = kThreads / 32;

// Rows are padded so that a column's elements are in different banks.
using SharedTile = float[kSlice][kTile + 1];

struct HeadPlace {
  int64_t b, h;
  int64_t tile_row, tile_col;  // in units of kTile
  Sequence sequence;
};

__host__ __device__ int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks are numbered [b][h][tile_row][tile_col].
__device__ HeadPlace Place(const Attention& a, int64_t block, int64_t tile_cols) {
  const int64_t tile_rows = CeilDivide(a.problem.len_q, kTile);
  HeadPlace place;
  place.tile_col = block % tile_cols;
  place.tile_row = block / tile_cols % tile_rows;
  const int64_t head = block / tile_cols / tile_rows;
  place.h = head % a.problem.heads_q;
  place.b = head / a.problem.heads_q;
  place.sequence = SequenceOf(a, place.b);
  return place;
}

__device__ float* ScoreRow(const Attention& a, float* scores, int64_t b, int64_t h, int64_t i) {
  const Problem& p = a.problem;
  return scores + ((b * p.heads_q + h) * p.len_q + i) * p.len_k;
}

// Element (row, col) of a head, 0 outside of [0, rows) x [0, cols).
__device__ float LoadOrZero(const ConstTensorView& view, DType dtype, int64_t head, int64_t row,
                            int64_t rows, int64_t col, int64_t cols) {
  if (row >= rows || col >= cols) return 0.0f;
  return LoadGlobal(view.data, dtype, head + row * view.stride_l + col);
}

// The same for a key's row, dense or paged.
template <bool kPaged>
__device__ float LoadKeyOrZero(const Attention& a, const ConstTensorView& view,
                               const HeadPlace& place, int64_t head, int64_t key, int64_t col,
                               int64_t cols) {
  if constexpr (!kPaged) {
    return LoadOrZero(view, a.problem.dtype, head, key, place.sequence.k_len, col, cols);
  }
  if (key >= place.sequence.k_len || col >= cols) return 0.0f;
  const int64_t row =
      KeyElement(a, view, place.sequence, place.b, place.h / a.problem.group(), key);
  return LoadGlobal(view.data, a.problem.dtype, row + col);
}

// One score with all terms of problem.h between q.k and the mask.
__device__ float FinishScore(const Attention& a, const HeadPlace& place, int64_t i, int64_t j,
                             float dot) {
  const Problem& p = a.problem;
  float s = CapOf(p).Apply(p.scale * dot);
  if (p.has_bias) {
    const float bias = LoadGlobalBias(
        a.bias, place.b * a.bias.stride_b + place.h * a.bias.stride_h + i * a.bias.stride_q + j);
    if (HasBits(a) && bias < 0.0f) return bias;
    s += bias;
  }
  if (p.has_alibi) {
    const float slope = a.alibi_slopes[place.b * a.alibi_stride_b + place.h];
    s -= slope * fabsf(static_cast<float>(j - i - place.sequence.offset));
  }
  return s;
}

// acc += a^T b over one slice in shared memory.
__device__ void MultiplySlice(const SharedTile& a, const SharedTile& b, int ty, int tx,
                              float (&acc)[4][4]) {
#pragma unroll
  for (int d = 0; d < kSlice; ++d) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        acc[r][c] = fmaf(a[d][ty + r * kEdge], b[d][tx + c * kEdge], acc[r][c]);
      }
    }
  }
}

// Writes the scores of true rows and keys; -inf where the mask hides a key.
template <bool kPaged>
__global__ void __launch_bounds__(kThreads)
    ScoreKernel(const __grid_constant__ Attention a, float* scores, int64_t first_block) {
  __shared__ SharedTile q_slice, k_slice;
  const Problem& p = a.problem;
  const HeadPlace place = Place(a, first_block + blockIdx.x, CeilDivide(p.len_k, kTile));
  const Sequence& s = place.sequence;
  const int64_t row_begin = place.tile_row * kTile;
  const int64_t key_begin = place.tile_col * kTile;
  if (row_begin >= s.q_len || key_begin >= s.k_len) return;
  const int64_t q_head = place.b * a.q.stride_b + place.h * a.q.stride_h + s.q_row * a.q.stride_l;
  const int64_t k_head =
      place.b * a.k.stride_b + place.h / p.group() * a.k.stride_h + s.k_row * a.k.stride_l;
  const int tx = threadIdx.x % kEdge, ty = threadIdx.x / kEdge;
  float dot[4][4] = {};
  for (int64_t d = 0; d < p.dim; d += kSlice) {
    for (int n = threadIdx.x; n < kTile * kSlice; n += kThreads) {
      const int row = n / kSlice, col = n % kSlice;
      q_slice[col][row] =
          LoadOrZero(a.q, p.dtype, q_head, row_begin + row, s.q_len, d + col, p.dim);
      k_slice[col][row] =
          LoadKeyOrZero<kPaged>(a, a.k, place, k_head, key_begin + row, d + col, p.dim);
    }
    __syncthreads();
    MultiplySlice(q_slice, k_slice, ty, tx, dot);
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int64_t i = row_begin + ty + r * kEdge;
    if (i >= s.q_len) continue;
    const KeyRange keys = VisibleKeys(p.mask, s, i);
    float* row = ScoreRow(a, scores, place.b, place.h, i);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t j = key_begin + tx + c * kEdge;
      if (j >= s.k_len) continue;
      const bool visible = j >= keys.begin && j < keys.end;
      row[j] = visible ? FinishScore(a, place, i, j, dot[r][c]) : NegativeInfinity();
    }
  }
}

__device__ float WarpMax(float value) {
  for (int bit = 16; bit > 0; bit /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, bit));
  }
  return value;
}
__device__ float WarpSum(float value) {
  for (int bit = 16; bit > 0; bit /= 2) value += __shfl_xor_sync(0xffffffffu, value, bit);
  return value;
}

// Turns a row's scores into weights, divided by their sum (sink included); -0 where the score was
// -inf (IsHiddenWeight) and where dropout removes it. fmaxf ignores NaN, but a NaN score makes its
// own weight NaN, and so the sum and the row.
__device__ void SoftmaxRow(const Attention& a, float* row, int64_t k_len, const RowId& id, int lane,
                           float* lse) {
  SoftmaxState<float> state;
  float max = NegativeInfinity();
  for (int64_t j = lane; j < k_len; j += 32) max = fmaxf(max, row[j]);
  max = WarpMax(max);
  const float base = max == NegativeInfinity() ? 0.0f : max;
  float sum = 0.0f;
  for (int64_t j = lane; j < k_len; j += 32) {
    const float weight = row[j] == NegativeInfinity() ? -0.0f : expf(row[j] - base);
    row[j] = weight;
    sum += weight;
  }
  state.max = max;
  state.sum = WarpSum(sum);
  const bool has_sink = a.problem.has_sinks;
  const float factor = OutputFactor(state, 1.0f, has_sink, has_sink ? a.sinks[id.h] : 0.0f);
  const bool dropout = a.problem.dropout > 0;
  for (int64_t j = lane; j < k_len; j += 32) {
    row[j] = dropout && !KeepsWeight(a, id.b, id.h, id.i, j) ? -0.0f : row[j] * factor;
  }
  *lse = LogSumExp(state);
}

// One warp per row, rows numbered [b][h][i]; padding rows get their LSE here.
__global__ void __launch_bounds__(kThreads)
    SoftmaxKernel(const __grid_constant__ Attention a, float* scores, int64_t first_block) {
  const Problem& p = a.problem;
  const int lane = threadIdx.x % 32;
  const int64_t n = (first_block + blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int64_t i = n % p.len_q;
  const int64_t h = n / p.len_q % p.heads_q;
  const int64_t b = n / p.len_q / p.heads_q;
  if (b >= p.batch) return;
  const Sequence s = SequenceOf(a, b);
  if (i >= s.q_rows) return;
  float lse = NegativeInfinity();
  if (i < s.q_len) SoftmaxRow(a, ScoreRow(a, scores, b, h, i), s.k_len, {b, h, i}, lane, &lse);
  if (p.return_lse && lane == 0) {
    a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i] = lse;
  }
}

// acc += p^T v over one slice; skips the value rows of hidden keys, because 0 * NaN is NaN. p has
// halved weights: rounded weights may sum to more than 1, and a mean of the largest values would
// overflow on the way.
__device__ void AccumulateSlice(const SharedTile& p, const SharedTile& v, int ty, int tx,
                                float (&acc)[4][4]) {
#pragma unroll
  for (int j = 0; j < kSlice; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float weight = p[j][ty + r * kEdge];
      if (IsHiddenWeight(weight)) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[r][c] = fmaf(weight, v[j][tx + c * kEdge], acc[r][c]);
    }
  }
}

template <bool kPaged>
__global__ void __launch_bounds__(kThreads)
    OutputKernel(const __grid_constant__ Attention a, float* scores, int64_t first_block) {
  __shared__ SharedTile p_slice, v_slice;
  const Problem& p = a.problem;
  const HeadPlace place = Place(a, first_block + blockIdx.x, CeilDivide(p.dim_v, kTile));
  const Sequence& s = place.sequence;
  const int64_t row_begin = place.tile_row * kTile;
  const int64_t col_begin = place.tile_col * kTile;
  if (row_begin >= s.q_rows) return;
  const int64_t v_head =
      place.b * a.v.stride_b + place.h / p.group() * a.v.stride_h + s.k_row * a.v.stride_l;
  const int tx = threadIdx.x % kEdge, ty = threadIdx.x / kEdge;
  float acc[4][4] = {};
  const bool padding = row_begin >= s.q_len;
  for (int64_t j = 0; j < s.k_len && !padding; j += kSlice) {
    for (int n = threadIdx.x; n < kTile * kSlice; n += kThreads) {
      const int row = n / kSlice, key = n % kSlice;
      const bool exists = row_begin + row < s.q_len && j + key < s.k_len;
      p_slice[key][row] =
          exists ? ScoreRow(a, scores, place.b, place.h, row_begin + row)[j + key] / 2 : -0.0f;
      const int v_key = n / kTile, col = n % kTile;
      v_slice[v_key][col] =
          LoadKeyOrZero<kPaged>(a, a.v, place, v_head, j + v_key, col_begin + col, p.dim_v);
    }
    __syncthreads();
    AccumulateSlice(p_slice, v_slice, ty, tx, acc);
    __syncthreads();
  }
  const int64_t o_head = place.b * a.o.stride_b + place.h * a.o.stride_h + s.q_row * a.o.stride_l;
  const float scale = DropoutScale(p.dropout);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int64_t i = row_begin + ty + r * kEdge;
    if (i >= s.q_rows) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t col = col_begin + tx + c * kEdge;
      if (col < p.dim_v) {
        StoreGlobal(a.o.data, p.o_dtype(), o_head + i * a.o.stride_l + col,
                    Mean(acc[r][c], 2) * scale);
      }
    }
  }
}

using NaiveKernel = void (*)(Attention, float*, int64_t);

cudaError_t LaunchBlocks(NaiveKernel kernel, const Attention& attention, float* scores,
                         int64_t blocks, cudaStream_t stream) {
  for (int64_t first = 0; first < blocks; first += kGridBlocksMax) {
    const auto count = static_cast<unsigned>(std::min(blocks - first, kGridBlocksMax));
    kernel<<<count, kThreads, 0, stream>>>(attention, scores, first);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchNaive(const Attention& attention, float* scores, cudaStream_t stream) {
  const Problem& p = attention.problem;
  const int64_t heads = p.batch * p.heads_q;
  const int64_t tiles = heads * CeilDivide(p.len_q, kTile);
  const bool paged = p.page_rows > 0;
  cudaError_t error = LaunchBlocks(paged ? ScoreKernel<true> : ScoreKernel<false>, attention,
                                   scores, tiles * CeilDivide(p.len_k, kTile), stream);
  if (error != cudaSuccess) return error;
  error = LaunchBlocks(SoftmaxKernel, attention, scores,
                       CeilDivide(heads * p.len_q, kWarpsPerBlock), stream);
  if (error != cudaSuccess) return error;
  return LaunchBlocks(paged ? OutputKernel<true> : OutputKernel<false>, attention, scores,
                      tiles * CeilDivide(p.dim_v, kTile), stream);
}

cudaError_t LoadNaive() {
  constexpr NaiveKernel kKernels[] = {ScoreKernel<false>, ScoreKernel<true>, SoftmaxKernel,
                                      OutputKernel<false>, OutputKernel<true>};
  for (const NaiveKernel kernel : kKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace attend::cuda
