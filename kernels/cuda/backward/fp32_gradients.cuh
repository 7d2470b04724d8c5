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

// A block's work: whole gradients, or repairs of the non-finite elements that another kernel left.
// Repairs of dK and dV together would take too many registers.
enum class Computes { kAll, kRepairsOfKeys, kRepairsOfValues, kRepairsOfQueries };

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

// A thread's sums: four adjacent keys, four of every 64 columns.
template <class T>
using KeySums = float[4][T::kD / 16];

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
    const float4 four = LoadShared4(&weights[i][4 * y]);
    const float weight[4] = {four.x, four.y, four.z, four.w};
    const auto seen = static_cast<uint32_t>(counting[i] >> (4 * y));
#pragma unroll
    for (int n = 0; n < T::kD / 64; ++n) {
      const float4 row = LoadShared4(&rows[i][4 * x + 64 * n]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
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
  const int64_t first = key + threadIdx.x / 16 * 4;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
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

// dK or dV of a block. A repair covers the elements in `wanted`, one bit each.
template <class T, Computes kComputes>
struct KeyElements {
  const TensorView& to;
  const int64_t dim;
  uint64_t wanted = 0;
  KeySums<T> sums = {};

  __device__ __forceinline__ void Find(const Fp32Head& at, DType dtype, int64_t key, int64_t rows) {
    // 16-bit weights do not overflow, so an Inf in dV is genuine: only NaN needs repair.
    constexpr bool kNan = kComputes == Computes::kRepairsOfValues;
    VisitKeys<T>(to, at, key, rows, dim, [&](int64_t index, int n) {
      const float x = LoadGlobal(to.data, dtype, index);
      if (kNan ? isnan(x) : NonFinite(x)) wanted |= uint64_t{1} << n;
    });
  }
  // Whether further pairs may change a wanted element: it is not yet NaN, or, if the tile's own
  // factors are finite, not yet Inf either.
  __device__ __forceinline__ bool IsOpen(bool careful) const {
    bool open = false;
#pragma unroll
    for (int n = 0; n < 4 * (T::kD / 16); ++n) {
      const float sum = sums[n / (T::kD / 16)][n % (T::kD / 16)];
      open = open || ((wanted >> n & 1) != 0 && !(careful ? isnan(sum) : NonFinite(sum)));
    }
    return open;
  }
  __device__ __forceinline__ void Store(const Fp32Head& at, DType dtype, int64_t key,
                                        int64_t rows) const {
    VisitKeys<T>(to, at, key, rows, dim, [&](int64_t index, int n) {
      if (kComputes != Computes::kAll && (wanted >> n & 1) == 0) return;
      StoreGlobal(to.data, dtype, index, sums[n / (T::kD / 16)][n % (T::kD / 16)]);
    });
  }
};

// Whether some row of the tile has non-finite terms: then its gradients are not finite, nor are
// those of the keys that it sees.
template <class T>
__device__ __forceinline__ bool IsSpecial(const Fp32Head& at, int64_t row) {
  const int64_t i = row + threadIdx.x;
  bool special = false;
  if (threadIdx.x < T::kRows && i < at.s.q_len) {
    const int64_t term = TermIndex(at.pass.attention.problem, at.s, at.b, at.h, i);
    special = !(at.Lse(i) < INFINITY) || NonFinite(at.pass.less[term]);
  }
  return __syncthreads_or(special) != 0;
}

// One block per tile of keys of one KV head, over its group's heads and their rows. A repair first
// adds the contributions of rows with non-finite terms, which alone decide most non-finite
// elements.
template <class T, Computes kComputes = Computes::kAll>
__device__ __forceinline__ void KeyGradients(const BackwardPass& pass, uint32_t block) {
  constexpr bool kRepairs = kComputes != Computes::kAll;
  constexpr bool kKeys = kComputes != Computes::kRepairsOfValues;
  constexpr bool kValues = kComputes != Computes::kRepairsOfKeys;
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const Gradients& g = pass.gradients;
  const int64_t tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  const int64_t key = block % tiles * T::kKeys;
  const int64_t kv_head = block / tiles % p.heads_kv;
  const int64_t b = block / tiles / p.heads_kv;
  const int64_t group = p.group();
  KeyElements<T, kComputes> d_k{g.d_k, p.dim}, d_v{g.d_v, p.dim_v};
  Fp32Head at(pass, b, kv_head * group);
  const int64_t rows = p.packed ? at.s.k_len : p.len_k;
  if constexpr (kRepairs) {
    if (kKeys) d_k.Find(at, p.dtype, key, rows);
    if (kValues) d_v.Find(at, p.dtype, key, rows);
    if (!__syncthreads_or((d_k.wanted | d_v.wanted) != 0)) return;
  }
  const bool keys_careful = __syncthreads_or(LoadKeys<T>(shared, at, key)) != 0;
  bool done = false;
  for (int others = kRepairs ? 0 : 1; others < 2 && !done; ++others) {
    for (at.h = kv_head * group; at.h < (kv_head + 1) * group && !done; ++at.h) {
      for (int64_t row = 0; row < at.s.q_len && !done; row += T::kRows) {
        if (!TilesMeet<T>(at, row, key)) continue;
        if (kRepairs && IsSpecial<T>(at, row) == (others == 1)) continue;
        __syncthreads();
        const bool found = LoadQueries<T>(shared, at, row);
        const bool careful = __syncthreads_or(found || keys_careful) != 0;
        ComputeWeights<T>(shared, at, row, key);
        __syncthreads();
        if (careful) {
          if (kValues) AddToKeys<T, true>(shared.kept, shared.weight, shared.d_o, d_v.sums);
          if (kKeys) AddToKeys<T, true>(shared.seen, shared.d_dot, shared.q, d_k.sums);
        } else {
          if (kValues) AddToKeys<T, false>(shared.kept, shared.weight, shared.d_o, d_v.sums);
          if (kKeys) AddToKeys<T, false>(shared.seen, shared.d_dot, shared.q, d_k.sums);
        }
        done = kRepairs && !__syncthreads_or((kKeys ? d_k : d_v).IsOpen(true));
      }
    }
    if (kRepairs && others == 0 && !done) {
      done = !__syncthreads_or((kKeys ? d_k : d_v).IsOpen(keys_careful));
    }
  }
  at.h = kv_head * group;
  if (kKeys) d_k.Store(at, p.dtype, key, rows);
  if (kValues) d_v.Store(at, p.dtype, key, rows);
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

// One block per tile of rows of one head, over their keys. A repair ends early once all wanted
// elements are NaN.
template <class T, Computes kComputes = Computes::kAll>
__device__ __forceinline__ void QueryGradients(const BackwardPass& pass, uint32_t block) {
  constexpr bool kRepairs = kComputes != Computes::kAll;
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const int64_t tiles = (p.len_q + T::kRows - 1) / T::kRows;
  const int64_t row = block % tiles * T::kRows;
  const Fp32Head at(pass, block / tiles / p.heads_q, block / tiles % p.heads_q);
  const TensorView& to = pass.gradients.d_q;
  QuerySums<T> sums = {};
  uint32_t wanted = 0;  // elements to repair, one bit each
  if constexpr (kRepairs) {
    if (to.data == nullptr) return;
    VisitQueries<T>(to, at, row, [&](int64_t index, int n) {
      if (NonFinite(LoadGlobal(to.data, p.dtype, index))) wanted |= 1u << n;
    });
    if (!__syncthreads_or(wanted != 0)) return;
  }
  const bool rows_careful = LoadQueries<T>(shared, at, row);
  for (int64_t key = 0; key < at.s.k_len; key += T::kKeys) {
    if (!TilesMeet<T>(at, row, key)) continue;
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
    if constexpr (kRepairs) {
      bool open = false;
#pragma unroll
      for (int n = 0; n < T::kRowsEach * (T::kD / 16); ++n) {
        open = open || ((wanted >> n & 1) != 0 && !isnan(sums[n / (T::kD / 16)][n % (T::kD / 16)]));
      }
      if (!__syncthreads_or(open)) break;
    }
  }
  VisitQueries<T>(to, at, row, [&](int64_t index, int n) {
    if (kRepairs && (wanted >> n & 1) == 0) return;
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

// Blocks of a launch, or units of Fp32Redo.
template <class T, Of kOf>
ATTEND_HD inline int64_t Blocks(const BackwardPass& pass) {
  const Problem& p = pass.attention.problem;
  const int64_t key_tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  if (kOf == Of::kKeys) return key_tiles * p.heads_kv * p.batch;
  if (kOf != Of::kBias) return (p.len_q + T::kRows - 1) / T::kRows * p.heads_q * p.batch;
  const BiasShape shape = ShapeOfBias(p, pass.gradients.d_bias);
  return key_tiles * RowTilesOfBias<T>(shape) * shape.heads * shape.batch;
}

// Calls launch(tile) with the tile that the problem needs.
template <class Launch>
cudaError_t WithFp32Tile(Passes passes, const Launch& launch) {
  const Problem& p = passes.front().attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) return launch(Fp32Tile<64, 64>{});
  if (dim <= 128) return launch(Fp32Tile<128, 64>{});
  return launch(Fp32Tile<256, 32>{});
}

}  // namespace attend::cuda
