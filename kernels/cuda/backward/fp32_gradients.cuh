// SPDX-License-Identifier: Apache-2.0
//
// Backward pass on CUDA cores: what a block computes of each gradient, and of rows' terms. Seven
// products per tile in two kernels instead of five in one, as dK and dV need a block per tile of
// keys and dQ one per tile of rows; so no block waits for another and nothing is added atomically.
// The algorithm is that of Dao et al. 2022, appendix B.4.

#pragma once

#include <algorithm>

#include "kernels/cuda/backward/fp32_tile.cuh"

namespace attend::cuda {

// kCareful: if factors may be NaN or Inf, pairs that do not count must be skipped, because 0 * NaN
// is NaN.
template <bool kCareful>
__device__ __forceinline__ float AddIfSeen(bool seen, float weight, float x, float sum) {
  return kCareful && !seen ? sum : fmaf(weight, x, sum);
}

// ---- terms of rows ------------------------------------------------------------------------------

// One block per tile of rows of one head, over their keys.
template <class T>
__device__ __forceinline__ void MeasureRows(const BackwardPass& pass, uint32_t block) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const int64_t tiles = (p.len_q + T::kRows - 1) / T::kRows;
  const int64_t row = block % tiles * T::kRows;
  const Fp32Head at(pass, block / tiles / p.heads_q, block / tiles % p.heads_q);
  const int64_t end = min(row + T::kRows, at.s.q_len);
  if (!IsAnyMeasured(pass, at.s, at.b, at.h, row, end)) return;
  RowMeasure rows[T::kRowsEach];
  LoadQueries<T>(shared, at, row);
  for (int64_t key = 0; key < at.s.k_len; key += T::kKeys) {
    if (!TilesMeet<T>(at, row, key)) continue;
    __syncthreads();
    LoadKeys<T>(shared, at, key);
    __syncthreads();
    ForPairs<T>(shared, at, row, key, [&](int r, int, const Fp32Pair& pair) {
      rows[r / 16].Raise(pair.score, kLog2E);
      rows[r / 16].Add(pair.score, pair.d_weight, kLog2E);
    });
  }
#pragma unroll
  for (int r = 0; r < T::kRowsEach; ++r) {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) rows[r].AddLane(distance, kLog2E);
    const int64_t i = row + threadIdx.x / 16 + 16 * r;
    if (threadIdx.x % 16 != 0 || i >= end) continue;
    const Measured how = MeasuredOf(pass, at.s, at.b, at.h, i);
    if (how == Measured::kNothing) continue;
    StoreMeasured(pass, at.s, at.b, at.h, i, rows[r], how, kLog2E, 1.0f);
  }
}

// ---- dK and dV ----------------------------------------------------------------------------------

// A thread's sums: adjacent keys, four of every 64 columns.
template <class T>
using KeySums = float[T::kKeysEach][T::kD / 16];

// sums += weights^T rows, over the pairs in `counting`.
template <class T, bool kCareful>
__device__ __forceinline__ void AddToKeys(const uint64_t (&counting)[T::kRows],
                                          const float (&weights)[T::kRows][T::kStrideP],
                                          const float (&rows)[T::kRows][T::kStride],
                                          KeySums<T>& sums) {
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
#pragma unroll 2
  for (int i = 0; i < T::kRows; ++i) {
    float weight[T::kKeysEach];
    if constexpr (T::kKeysEach == 4) {
      const float4 four = LoadShared4(&weights[i][4 * y]);
      weight[0] = four.x, weight[1] = four.y, weight[2] = four.z, weight[3] = four.w;
    } else {
#pragma unroll
      for (int c = 0; c < T::kKeysEach; ++c) weight[c] = weights[i][T::kKeysEach * y + c];
    }
    const auto seen = static_cast<uint32_t>(counting[i] >> (T::kKeysEach * y));
#pragma unroll
    for (int n = 0; n < T::kD / 64; ++n) {
      const float4 row = LoadShared4(&rows[i][4 * x + 64 * n]);
#pragma unroll
      for (int c = 0; c < T::kKeysEach; ++c) {
        float* const sum = &sums[c][4 * n];
        const bool counts = seen >> c & 1;
        sum[0] = AddIfSeen<kCareful>(counts, weight[c], row.x, sum[0]);
        sum[1] = AddIfSeen<kCareful>(counts, weight[c], row.y, sum[1]);
        sum[2] = AddIfSeen<kCareful>(counts, weight[c], row.z, sum[2]);
        sum[3] = AddIfSeen<kCareful>(counts, weight[c], row.w, sum[3]);
      }
    }
  }
}

// Calls visit(index, n) for each of the thread's elements, whose sum is sums[n / (kD / 16)][n % (kD
// / 16)].
template <class T, class Visit>
__device__ __forceinline__ void VisitKeys(const TensorView& to, const Fp32Head& at, int64_t key,
                                          int64_t rows, int64_t dim, const Visit& visit) {
  if (to.data == nullptr) return;
  const int x = threadIdx.x % 16;
  const int64_t first = key + threadIdx.x / 16 * T::kKeysEach;
#pragma unroll
  for (int c = 0; c < T::kKeysEach; ++c) {
    if (first + c >= rows) break;
    const int64_t row =
        at.b * to.stride_b + at.kv_head() * to.stride_h + (at.s.k_row + first + c) * to.stride_l;
#pragma unroll
    for (int n = 0; n < T::kD / 16; ++n) {
      const int col = 4 * x + n / 4 * 64 + n % 4;
      if (col < dim) visit(row + col, c * (T::kD / 16) + n);
    }
  }
}

// Adds the contributions of the rows from `row` on to dK or dV, or both.
template <class T, bool kKeys, bool kValues>
__device__ __forceinline__ void AddRows(typename T::Shared& shared, const Fp32Head& at, int64_t row,
                                        int64_t key, bool keys_careful, KeySums<T>& d_k,
                                        KeySums<T>& d_v) {
  __syncthreads();
  const bool found = LoadQueries<T>(shared, at, row);
  const bool careful = __syncthreads_or(found || keys_careful) != 0;
  ComputeWeights<T>(shared, at, row, key);
  __syncthreads();
  if (careful) {
    if (kValues) AddToKeys<T, true>(shared.kept, shared.weight, shared.d_o, d_v);
    if (kKeys) AddToKeys<T, true>(shared.seen, shared.d_dot, shared.q, d_k);
  } else {
    if (kValues) AddToKeys<T, false>(shared.kept, shared.weight, shared.d_o, d_v);
    if (kKeys) AddToKeys<T, false>(shared.seen, shared.d_dot, shared.q, d_k);
  }
}

// One block per tile of keys of one KV head, over its group's heads and their rows.
template <class T>
__device__ __forceinline__ void KeyGradients(const BackwardPass& pass, uint32_t block) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const Gradients& g = pass.gradients;
  const int64_t tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  const int64_t key = block % tiles * T::kKeys;
  const int64_t kv_head = block / tiles % p.heads_kv;
  const int64_t b = block / tiles / p.heads_kv;
  const int64_t group = p.group();
  KeySums<T> d_k = {}, d_v = {};
  Fp32Head at(pass, b, kv_head * group);
  const bool careful = __syncthreads_or(LoadKeys<T>(shared, at, key)) != 0;
  for (; at.h < (kv_head + 1) * group; ++at.h) {
    for (int64_t row = 0; row < at.s.q_len; row += T::kRows) {
      if (TilesMeet<T>(at, row, key))
        AddRows<T, true, true>(shared, at, row, key, careful, d_k, d_v);
    }
  }
  at.h = kv_head * group;
  const int64_t rows = p.packed ? at.s.k_len : p.len_k;
  VisitKeys<T>(g.d_k, at, key, rows, p.dim, [&](int64_t index, int n) {
    StoreGlobal(g.d_k.data, p.dtype, index, d_k[n / (T::kD / 16)][n % (T::kD / 16)]);
  });
  VisitKeys<T>(g.d_v, at, key, rows, p.dim_v, [&](int64_t index, int n) {
    StoreGlobal(g.d_v.data, p.dtype, index, d_v[n / (T::kD / 16)][n % (T::kD / 16)]);
  });
}

// ---- dQ -----------------------------------------------------------------------------------------

// A thread's sums: adjacent rows, four of every 64 columns.
template <class T>
using QuerySums = float[T::kRowsEach][T::kD / 16];

// sums += d_dot keys.
template <class T, bool kCareful>
__device__ __forceinline__ void AddToQueries(const typename T::Shared& shared, QuerySums<T>& sums) {
  const int x = threadIdx.x % 16;
  const int first = threadIdx.x / 16 * T::kRowsEach;
#pragma unroll 1
  for (int j = 0; j < T::kKeys; j += 4) {
    float weight[T::kRowsEach][4];
    uint32_t seen[T::kRowsEach];
#pragma unroll
    for (int r = 0; r < T::kRowsEach; ++r) {
      const float4 four = LoadShared4(&shared.d_dot[first + r][j]);
      weight[r][0] = four.x, weight[r][1] = four.y, weight[r][2] = four.z, weight[r][3] = four.w;
      seen[r] = static_cast<uint32_t>(shared.seen[first + r] >> j);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < T::kD / 64; ++n) {
        const float4 key = LoadShared4(&shared.k[j + m][4 * x + 64 * n]);
#pragma unroll
        for (int r = 0; r < T::kRowsEach; ++r) {
          float* const sum = &sums[r][4 * n];
          const bool counts = seen[r] >> m & 1;
          sum[0] = AddIfSeen<kCareful>(counts, weight[r][m], key.x, sum[0]);
          sum[1] = AddIfSeen<kCareful>(counts, weight[r][m], key.y, sum[1]);
          sum[2] = AddIfSeen<kCareful>(counts, weight[r][m], key.z, sum[2]);
          sum[3] = AddIfSeen<kCareful>(counts, weight[r][m], key.w, sum[3]);
        }
      }
    }
  }
}

// Calls visit(index, n) for each of the thread's elements, as VisitKeys does.
template <class T, class Visit>
__device__ __forceinline__ void VisitQueries(const TensorView& to, const Fp32Head& at, int64_t row,
                                             const Visit& visit) {
  const int x = threadIdx.x % 16;
#pragma unroll
  for (int r = 0; r < T::kRowsEach; ++r) {
    const int64_t i = row + threadIdx.x / 16 * T::kRowsEach + r;
    if (i >= at.s.q_rows) break;
    const int64_t base = at.b * to.stride_b + at.h * to.stride_h + (at.s.q_row + i) * to.stride_l;
#pragma unroll
    for (int n = 0; n < T::kD / 16; ++n) {
      const int col = 4 * x + n / 4 * 64 + n % 4;
      if (col < at.pass.attention.problem.dim) visit(base + col, r * (T::kD / 16) + n);
    }
  }
}

// Adds the contributions of the keys from `key` on to the rows' dQ.
template <class T>
__device__ __forceinline__ void AddKeys(typename T::Shared& shared, const Fp32Head& at, int64_t row,
                                        int64_t key, bool rows_careful, QuerySums<T>& sums) {
  __syncthreads();
  const bool found = LoadKeys<T>(shared, at, key);
  const bool careful = __syncthreads_or(found || rows_careful) != 0;
  ComputeWeights<T>(shared, at, row, key);
  __syncthreads();
  if (careful) {
    AddToQueries<T, true>(shared, sums);
  } else {
    AddToQueries<T, false>(shared, sums);
  }
}

// One block per tile of rows of one head, over their keys.
template <class T>
__device__ __forceinline__ void QueryGradients(const BackwardPass& pass, uint32_t block) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const int64_t tiles = (p.len_q + T::kRows - 1) / T::kRows;
  const int64_t row = block % tiles * T::kRows;
  const Fp32Head at(pass, block / tiles / p.heads_q, block / tiles % p.heads_q);
  const TensorView& to = pass.gradients.d_q;
  QuerySums<T> sums = {};
  const bool careful = LoadQueries<T>(shared, at, row);
  for (int64_t key = 0; key < at.s.k_len; key += T::kKeys) {
    if (TilesMeet<T>(at, row, key)) AddKeys<T>(shared, at, row, key, careful, sums);
  }
  VisitQueries<T>(to, at, row, [&](int64_t index, int n) {
    StoreGlobal(to.data, p.dtype, index, sums[n / (T::kD / 16)][n % (T::kD / 16)]);
  });
}

// ---- dBias --------------------------------------------------------------------------------------

// The sequences, heads and rows that dBias has; broadcast dimensions have 1.
struct BiasShape {
  int64_t batch, heads, rows;
};
ATTEND_HD inline BiasShape ShapeOfBias(const Problem& p, const TensorView& to) {
  return {to.stride_b != 0 ? p.batch : 1, to.stride_h != 0 ? p.heads_q : 1,
          to.stride_l != 0 ? p.len_q : 1};
}
template <class T>
ATTEND_HD inline int64_t RowTilesOfBias(const BiasShape& shape) {
  return shape.rows == 1 ? 1 : (shape.rows + T::kRows - 1) / T::kRows;
}

// One block per tile of dBias, over the sequences, heads and rows that share it. Row sums go
// through shared memory, in the rows' order.
template <class T>
__device__ __forceinline__ void BiasGradients(const BackwardPass& pass, uint32_t block) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const TensorView& to = pass.gradients.d_bias;
  const BiasShape shape = ShapeOfBias(p, to);
  const int64_t key_tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  const int64_t row_tiles = RowTilesOfBias<T>(shape);
  int64_t n = block;
  const int64_t key = n % key_tiles * T::kKeys;
  n /= key_tiles;
  const int64_t own_row = n % row_tiles * T::kRows;
  n /= row_tiles;
  const int64_t own_head = n % shape.heads;
  const int64_t own_b = n / shape.heads;
  const bool one_row = to.stride_l == 0;
  float sums[T::kRowsEach][T::kKeysEach] = {};
  for (int64_t b = own_b; b < (shape.batch == 1 ? p.batch : own_b + 1); ++b) {
    for (int64_t h = own_head; h < (shape.heads == 1 ? p.heads_q : own_head + 1); ++h) {
      const Fp32Head at(pass, b, h);
      for (int64_t row = own_row; row < (one_row ? at.s.q_len : own_row + 1); row += T::kRows) {
        if (!TilesMeet<T>(at, row, key)) continue;
        __syncthreads();
        LoadQueries<T>(shared, at, row);
        LoadKeys<T>(shared, at, key);
        __syncthreads();
        ForPairs<T>(shared, at, row, key, [&](int r, int c, const Fp32Pair& pair) {
          sums[r / 16][c / 16] += pair.d_score;
        });
      }
    }
  }
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
  float* const data = static_cast<float*>(to.data) + own_b * to.stride_b + own_head * to.stride_h;
#pragma unroll
  for (int r = 0; r < T::kRowsEach; ++r) {
#pragma unroll
    for (int c = 0; c < T::kKeysEach; ++c) {
      const int64_t i = own_row + y + 16 * r;
      const int64_t j = key + x + 16 * c;
      if (one_row) {
        shared.weight[y + 16 * r][x + 16 * c] = sums[r][c];
      } else if (i < p.len_q && j < p.len_k) {
        data[i * to.stride_l + j] = sums[r][c];
      }
    }
  }
  if (!one_row) return;
  __syncthreads();
  for (int c = threadIdx.x; c < T::kKeys && key + c < p.len_k; c += T::kThreads) {
    float sum = 0.0f;
    for (int r = 0; r < T::kRows; ++r) sum += shared.weight[r][c];
    data[key + c] = sum;
  }
}

// ---- blocks -------------------------------------------------------------------------------------

enum class Of { kMeasure, kKeys, kQueries, kBias };

template <class T, Of kOf>
ATTEND_HD inline int64_t Blocks(const BackwardPass& pass) {
  const Problem& p = pass.attention.problem;
  const int64_t key_tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  if (kOf == Of::kKeys) return key_tiles * p.heads_kv * p.batch;
  if (kOf != Of::kBias) return (p.len_q + T::kRows - 1) / T::kRows * p.heads_q * p.batch;
  const BiasShape shape = ShapeOfBias(p, pass.gradients.d_bias);
  return key_tiles * RowTilesOfBias<T>(shape) * shape.heads * shape.batch;
}

// Calls launch(large), or launch(small) where a block has less shared memory than `large` needs.
// The smallest GPUs have 99 KiB.
template <class Large, class Small, class Launch>
cudaError_t WithFittingTile(Passes passes, const Launch& launch) {
  constexpr int kOwnBytes = 64;  // of a kernel, at most, beside its tile
  constexpr int kLarge = static_cast<int>(sizeof(typename Large::Shared)) + kOwnBytes;
  static_assert(sizeof(typename Small::Shared) + kOwnBytes <= 99 * 1024);
  return kLarge <= passes.front().block_bytes_max ? launch(Large{}) : launch(Small{});
}

// Calls launch(tile) with the tile for the problem and the device.
template <class Launch>
cudaError_t WithFp32Tile(Passes passes, const Launch& launch) {
  const Problem& p = passes.front().attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) return WithFittingTile<Fp32Tile<64, 64>, Fp32Tile<64, 64, 32>>(passes, launch);
  if (dim <= 128) return WithFittingTile<Fp32Tile<128, 64>, Fp32Tile<128, 32, 32>>(passes, launch);
  return WithFittingTile<Fp32Tile<256, 32>, Fp32Tile<256, 16, 16>>(passes, launch);
}

}  // namespace attend::cuda
