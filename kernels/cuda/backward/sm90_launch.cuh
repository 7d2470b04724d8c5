// SPDX-License-Identifier: Apache-2.0
//
// Which tiles the backward pass by wgmma has, and its launches. Included by the file of each dtype.

#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/backward/sm90_keys.cuh"
#include "kernels/cuda/backward/sm90_queries.cuh"
#include "kernels/cuda/backward/sm90_split_keys.cuh"
#include "kernels/cuda/backward/sm90_turns.cuh"

namespace attend::cuda::backward {

inline cudaError_t EncodeMaps(const BackwardPass& pass, int rows, int keys, TensorMaps* maps) {
  const TensorBoxes boxes{{rows, kCols}, {keys, kCols}, {keys, kCols}, {}};
  // dO as another attention's Q.
  Attention of_d_o = pass.attention;
  of_d_o.q = pass.gradients.d_o;
  of_d_o.problem.dim = of_d_o.problem.dim_v;
  of_d_o.k = of_d_o.v;
  cudaError_t error = EncodeTensorMaps(of_d_o, boxes, maps);
  if (error != cudaSuccess) return error;
  maps->o = maps->q;
  const CUtensorMap d_o = maps->o;
  error = EncodeTensorMaps(pass.attention, boxes, maps);
  maps->o = d_o;
  return error;
}

// Bytes of the tensors that a section's blocks walk: a part of the L2 cache, of which every half
// has a copy.
inline constexpr int64_t kSectionBytes = int64_t{16} << 20;

// For blocks of T's rows and keys, and `heads` heads of which each walks `bytes`.
template <class T>
cudaError_t MakeParams(const BackwardPass& pass, int64_t heads, int64_t bytes, Sm90Params* params) {
  const Problem& p = pass.attention.problem;
  params->pass = pass;
  params->cap_factor = p.softcap > 0.0f ? p.scale / p.softcap : 0.0f;
  params->kept_scale = DropoutScale(p.dropout);
  params->heads = heads;
  params->section = std::max<int64_t>(kSectionBytes / std::max<int64_t>(bytes, 1), 1);
  return EncodeMaps(pass, T::kRows, T::kKeys, &params->maps);
}

template <class T>
cudaError_t Launch(void (*kernel)(Sm90Params), int64_t blocks, const Sm90Params& params,
                   cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, T::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

// Keys and Queries: tiles.
template <class Keys, class Queries, class Class>
cudaError_t LaunchTiles(const BackwardPass& pass, cudaStream_t stream) {
  using Consumer = std::conditional_t<(Keys::kExchanges > 0), SplitKeysConsumer<Keys, Class>,
                                      KeysConsumer<Keys, Class>>;
  const Problem& p = pass.attention.problem;
  const Gradients& g = pass.gradients;
  const int64_t row_bytes = 2 * (p.dim + p.dim_v);
  Sm90Params params;
  cudaError_t error = cudaSuccess;
  if (g.d_k.data != nullptr || g.d_v.data != nullptr) {
    const int64_t heads = p.heads_kv * p.batch;
    const int64_t tiles = (p.len_k + Keys::kKeys - 1) / Keys::kKeys;
    error = MakeParams<Keys>(pass, heads, p.group() * p.len_q * row_bytes, &params);
    if (error != cudaSuccess) return error;
    error = Launch<Keys>(KeysSm90<Keys, Consumer>, heads * tiles, params, stream);
  }
  if (error == cudaSuccess && g.d_q.data != nullptr) {
    const int64_t heads = p.heads_q * p.batch;
    const int64_t tiles = (p.len_q + Queries::kRows - 1) / Queries::kRows;
    error = MakeParams<Queries>(pass, heads, p.len_k * row_bytes * p.heads_kv / p.heads_q, &params);
    if (error != cudaSuccess) return error;
    error = Launch<Queries>(QueriesSm90<Queries, Class>, heads * tiles, params, stream);
  }
  return error;
}

// Which tiles there are. Most that D and Dv may be, keys, rows, stages: as the templates name them.
// What a class adds takes registers, so some of its tiles are smaller.
template <class Class>
cudaError_t LaunchClass(const BackwardPass& pass, cudaStream_t stream) {
  constexpr bool kPlain = !Class::kSoftcap;
  const Problem& p = pass.attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) {
    constexpr int kPairs = kPlain ? 128 : 64;
    return LaunchTiles<KeysTile<64, 64, 128, kPairs, 2>, QueriesTile<64, 64, kPairs, 3, 3>, Class>(
        pass, stream);
  }
  if (dim <= 96) {
    return LaunchTiles<KeysTile<96, 96, 128, kPlain ? 80 : 64, 3>, QueriesTile<96, 96, 128, 2, 2>,
                       Class>(pass, stream);
  }
  if (dim <= 128) {
    using Keys = std::conditional_t<kPlain, KeysTile<128, 128, 128, 64, 3>,
                                    KeysTile<128, 128, 64, 128, 2, 1>>;
    return LaunchTiles<Keys, QueriesTile<128, 128, 128, 2, 2>, Class>(pass, stream);
  }
  if (p.dim <= 192 && p.dim_v <= 128) {
    return LaunchTiles<KeysTile<192, 128, 64, 96, 2, 2, kPlain ? 12 : 0>,
                       QueriesTile<192, 128, kPlain ? 96 : 80, 2, 2>, Class>(pass, stream);
  }
  return LaunchTiles<
      KeysTile<256, 256, 64, 64, 2, 2, kPlain ? 5 : 0>,
      std::conditional_t<kPlain, QueriesTile<256, 256, 64, 2, 1>, QueriesTile<256, 256, 32, 3, 3>>,
      Class>(pass, stream);
}

// With dropout: D and Dv up to 128.
template <class Class>
cudaError_t LaunchDropoutClass(const BackwardPass& pass, cudaStream_t stream) {
  const int64_t dim = std::max(pass.attention.problem.dim, pass.attention.problem.dim_v);
  if (dim <= 64) {
    return LaunchTiles<KeysTile<64, 64, 64, 128, 2, 2>, QueriesTile<64, 64, 64, 3, 3>, Class>(
        pass, stream);
  }
  if (dim <= 96) {
    return LaunchTiles<KeysTile<96, 96, 64, 128, 2, 1>, QueriesTile<96, 96, 64, 2, 2>, Class>(
        pass, stream);
  }
  return LaunchTiles<KeysTile<128, 128, 64, 128, 2, 1>, QueriesTile<128, 128, 64, 2, 2>, Class>(
      pass, stream);
}

// All gradients by one kernel, and dQ from its sums.
template <class Tile, bool kBfloat16>
cudaError_t LaunchTurns(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  Sm90Params params;
  const int64_t bytes = 2 * p.group() * p.len_q * (p.dim + p.dim_v);
  cudaError_t error = MakeParams<Tile>(pass, p.heads_kv * p.batch, bytes, &params);
  if (error != cudaSuccess) return error;
  const int64_t key_tiles = (p.len_k + Tile::kKeys - 1) / Tile::kKeys;
  error =
      Launch<Tile>(TurnsSm90<Tile, kBfloat16>, key_tiles * p.heads_kv * p.batch, params, stream);
  const int64_t row_tiles = (p.len_q + Tile::kRows - 1) / Tile::kRows * p.heads_q * p.batch;
  if (error != cudaSuccess || row_tiles == 0 || pass.gradients.d_q.data == nullptr) return error;
  NarrowQueries<Tile, kBfloat16>
      <<<static_cast<unsigned>(row_tiles), 128 * kConsumers, 0, stream>>>(pass);
  return cudaGetLastError();
}

template <bool kBfloat16>
cudaError_t LaunchGradients(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  if (pass.sums != nullptr) {
    return std::max(p.dim, p.dim_v) <= 64 ? LaunchTurns<TurnsTile<64>, kBfloat16>(pass, stream)
                                          : LaunchTurns<TurnsTile<128>, kBfloat16>(pass, stream);
  }
  if (p.softcap > 0.0f) return LaunchClass<Sm90Class<kBfloat16, true>>(pass, stream);
  return LaunchClass<Sm90Class<kBfloat16>>(pass, stream);
}

template <bool kBfloat16>
cudaError_t LaunchDropoutGradients(const BackwardPass& pass, cudaStream_t stream) {
  if (pass.attention.problem.softcap > 0.0f) {
    return LaunchDropoutClass<Sm90Class<kBfloat16, true, true>>(pass, stream);
  }
  return LaunchDropoutClass<Sm90Class<kBfloat16, false, true>>(pass, stream);
}

}  // namespace attend::cuda::backward
