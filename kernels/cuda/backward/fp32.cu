// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_fp32's backward pass: seven products of a tile in two kernels instead of five in one,
// as dK and dV want a block for each tile of keys and dQ one for each tile of rows; so no block
// waits for another and nothing is added atomically. The algorithm is that of Dao et al. 2022,
// appendix B.4.

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/fp32_tile.cuh"

namespace attend::cuda {
namespace {

// kCareful: with NaN or Inf among the factors, pairs that do not count must be left out, as
// 0 * NaN is NaN.
template <bool kCareful>
__device__ __forceinline__ float AddIfSeen(bool seen, float weight, float x, float sum) {
  return kCareful && !seen ? sum : fmaf(weight, x, sum);
}

// ---- dK and dV ----------------------------------------------------------------------------------

// A thread's sums: four neighbouring keys, of each 64 columns four.
template <class T>
using KeySums = float[4][T::kD / 16];

// sums += weights^T rows, of the pairs in `counting`.
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

template <class T>
__device__ __forceinline__ void StoreKeys(const TensorView& to, DType dtype, const Fp32Head& at,
                                          int64_t key, int64_t rows, int64_t dim,
                                          const KeySums<T>& sums) {
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
      if (col < dim) StoreGlobal(to.data, dtype, row + col, sums[c][n]);
    }
  }
}

// A block for a tile of keys of one KV head, over its group's heads and their rows.
template <class T>
__device__ __forceinline__ void KeyGradients(const BackwardPass& pass, uint32_t block) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const int64_t tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  const int64_t key = block % tiles * T::kKeys;
  const int64_t kv_head = block / tiles % p.heads_kv;
  const int64_t b = block / tiles / p.heads_kv;
  const int64_t group = p.group();
  KeySums<T> d_k = {}, d_v = {};
  Fp32Head at(pass, b, kv_head * group);
  const bool keys_careful = LoadKeys<T>(shared, at, key);
  for (at.h = kv_head * group; at.h < (kv_head + 1) * group; ++at.h) {
    for (int64_t row = 0; row < at.s.q_len; row += T::kRows) {
      if (!TilesMeet<T>(at, row, key)) continue;
      __syncthreads();
      const bool found = LoadQueries<T>(shared, at, row);
      const bool careful = __syncthreads_or(found || keys_careful) != 0;
      ComputeWeights<T>(shared, at, row, key);
      __syncthreads();
      if (careful) {
        AddToKeys<T, true>(shared.kept, shared.weight, shared.d_o, d_v);
        AddToKeys<T, true>(shared.seen, shared.d_dot, shared.q, d_k);
      } else {
        AddToKeys<T, false>(shared.kept, shared.weight, shared.d_o, d_v);
        AddToKeys<T, false>(shared.seen, shared.d_dot, shared.q, d_k);
      }
    }
  }
  at.h = kv_head * group;
  const int64_t rows = p.packed ? at.s.k_len : p.len_k;
  StoreKeys<T>(pass.gradients.d_k, p.dtype, at, key, rows, p.dim, d_k);
  StoreKeys<T>(pass.gradients.d_v, p.dtype, at, key, rows, p.dim_v, d_v);
}

// ---- dQ -----------------------------------------------------------------------------------------

// A thread's sums: neighbouring rows, of each 64 columns four.
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

// A block for a tile of rows of one head, over their keys.
template <class T>
__device__ __forceinline__ void QueryGradients(const BackwardPass& pass, uint32_t block) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const Problem& p = pass.attention.problem;
  const int64_t tiles = (p.len_q + T::kRows - 1) / T::kRows;
  const int64_t row = block % tiles * T::kRows;
  const Fp32Head at(pass, block / tiles / p.heads_q, block / tiles % p.heads_q);
  QuerySums<T> sums = {};
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
  }
  const TensorView& to = pass.gradients.d_q;
  const int x = threadIdx.x % 16;
#pragma unroll
  for (int r = 0; r < T::kRowsEach; ++r) {
    const int64_t i = row + threadIdx.x / 16 * T::kRowsEach + r;
    if (i >= at.s.q_rows) break;
    const int64_t base = at.b * to.stride_b + at.h * to.stride_h + (at.s.q_row + i) * to.stride_l;
#pragma unroll
    for (int n = 0; n < T::kD / 16; ++n) {
      const int col = 4 * x + n / 4 * 64 + n % 4;
      if (col < p.dim) StoreGlobal(to.data, p.dtype, base + col, sums[r][n]);
    }
  }
}

// ---- dBias --------------------------------------------------------------------------------------

// Which sequences, heads and rows of dBias there are, and how many of the problem's each sums.
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

// A block for a tile of dBias, over the sequences, heads and rows that share it. Row sums leave
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

// ---- launches -----------------------------------------------------------------------------------

enum class Of { kKeys, kQueries, kBias };

template <class T, Of kOf>
__device__ __forceinline__ void ComputeBlock(const BackwardPass& pass, uint32_t of_launch) {
  const uint32_t block = of_launch - pass.first_block;
  if constexpr (kOf == Of::kKeys) KeyGradients<T>(pass, block);
  if constexpr (kOf == Of::kQueries) QueryGradients<T>(pass, block);
  if constexpr (kOf == Of::kBias) BiasGradients<T>(pass, block);
}

// D256 has no registers for a loop.
template <class T>
constexpr bool kLoops = T::kD <= 128;

__device__ __forceinline__ bool IsWanted(const BackwardPass& pass) {
  return pass.redo == nullptr || *pass.redo != 0;
}

template <int kCount>
__device__ __forceinline__ bool IsAnyWanted(const LaunchList<PassItem, kCount>& list) {
  bool wanted = false;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const BackwardPass& pass = list.items[n].pass;
    wanted = wanted || (pass.first_block != kNoBlock && IsWanted(pass));
  }
  return wanted;
}

// Computes blocks of passes in which there is something to be computed, or computed again.
template <class T, Of kOf, int kCount>
__global__ void __launch_bounds__(T::kThreads, 1)
    Fp32Gradients(const __grid_constant__ LaunchList<PassItem, kCount> list) {
  if constexpr (kLoops<T>) {
    if (!IsAnyWanted(list)) return;
    for (uint32_t block = blockIdx.x; block < list.blocks; block += gridDim.x) {
      const BackwardPass& pass = list.Of(block).pass;
      if (kCount > 1 && !IsWanted(pass)) continue;
      __syncthreads();  // what the last one left in shared memory
      ComputeBlock<T, kOf>(pass, block);
    }
  } else {
    const BackwardPass& pass = list.Of(blockIdx.x).pass;
    if (IsWanted(pass)) ComputeBlock<T, kOf>(pass, blockIdx.x);
  }
}

// Of a launch that is for nothing almost always: what fills a GPU, for more would take longer to
// find that out.
constexpr int64_t kRedoBlocks = 512;

template <class T, Of kOf>
int64_t Blocks(const BackwardPass& pass) {
  const Problem& p = pass.attention.problem;
  const int64_t key_tiles = (p.len_k + T::kKeys - 1) / T::kKeys;
  if (kOf == Of::kKeys) return key_tiles * p.heads_kv * p.batch;
  if (kOf == Of::kQueries) return (p.len_q + T::kRows - 1) / T::kRows * p.heads_q * p.batch;
  const BiasShape shape = ShapeOfBias(p, pass.gradients.d_bias);
  return key_tiles * RowTilesOfBias<T>(shape) * shape.heads * shape.batch;
}

template <class T, Of kOf>
cudaError_t Launch(Passes passes, cudaStream_t stream) {
  std::vector<ItemBlocks<PassItem>> items;
  for (const BackwardPass& pass : passes) items.push_back({{pass}, Blocks<T, kOf>(pass)});
  LaunchShape shape{T::kThreads, static_cast<int>(sizeof(typename T::Shared))};
  if (kLoops<T> && passes.front().redo != nullptr) shape.blocks_max = kRedoBlocks;
  return LaunchItems(Fp32Gradients<T, kOf, 1>, Fp32Gradients<T, kOf, kItemsMax>, std::move(items),
                     shape, stream);
}

template <class T>
cudaError_t LaunchAll(Passes passes, cudaStream_t stream) {
  const Gradients& g = passes.front().gradients;
  cudaError_t error = cudaSuccess;
  if (g.d_k.data != nullptr || g.d_v.data != nullptr) {
    error = Launch<T, Of::kKeys>(passes, stream);
  }
  if (error == cudaSuccess && g.d_q.data != nullptr) {
    error = Launch<T, Of::kQueries>(passes, stream);
  }
  if (error == cudaSuccess && g.d_bias.data != nullptr) {
    error = Launch<T, Of::kBias>(passes, stream);
  }
  return error;
}

}  // namespace

cudaError_t LaunchFp32Gradients(Passes passes, cudaStream_t stream) {
  const Problem& p = passes.front().attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) return LaunchAll<Fp32Tile<64, 64>>(passes, stream);
  if (dim <= 128) return LaunchAll<Fp32Tile<128, 64>>(passes, stream);
  return LaunchAll<Fp32Tile<256, 32>>(passes, stream);
}

}  // namespace attend::cuda
