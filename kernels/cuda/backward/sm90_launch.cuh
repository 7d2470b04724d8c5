// SPDX-License-Identifier: Apache-2.0
//
// Which tiles the backward pass by wgmma has, and its launches. Included by the file of each dtype.

#pragma once

#include <algorithm>

#include "kernels/cuda/backward/sm90_keys.cuh"
#include "kernels/cuda/backward/sm90_queries.cuh"
#include "kernels/cuda/backward/sm90_turns.cuh"

namespace attend::cuda::backward {

using KeysD64 = KeysTile<64, 128, 2>;
using KeysD128 = KeysTile<128, 64, 3>;
using QueriesD64 = QueriesTile<64, 3>;
using QueriesD128 = QueriesTile<128, 2>;

inline cudaError_t EncodeMaps(const BackwardPass& pass, TensorMaps* maps) {
  const TensorBoxes boxes{{kQueryBox, kCols}, {kKeyBox, kCols}, {kKeyBox, kCols}, {}};
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

template <class KeysTile, class QueriesTile, bool kBfloat16>
cudaError_t LaunchTiles(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  const Gradients& g = pass.gradients;
  Sm90Params params;
  params.pass = pass;
  cudaError_t error = EncodeMaps(pass, &params.maps);
  if (error == cudaSuccess && (g.d_k.data != nullptr || g.d_v.data != nullptr)) {
    const int64_t tiles = (p.len_k + KeysTile::kKeys - 1) / KeysTile::kKeys;
    error = Launch<KeysTile>(KeysSm90<KeysTile, kBfloat16>, tiles * p.heads_kv * p.batch, params,
                             stream);
  }
  if (error == cudaSuccess && g.d_q.data != nullptr) {
    const int64_t tiles = (p.len_q + QueriesTile::kRows - 1) / QueriesTile::kRows;
    error = Launch<QueriesTile>(QueriesSm90<QueriesTile, kBfloat16>, tiles * p.heads_q * p.batch,
                                params, stream);
  }
  return error;
}

// All gradients by one kernel, and dQ from its sums.
template <class Tile, bool kBfloat16>
cudaError_t LaunchTurns(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  Sm90Params params;
  params.pass = pass;
  cudaError_t error = EncodeMaps(pass, &params.maps);
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
  if (std::max(p.dim, p.dim_v) <= 64) {
    return LaunchTiles<KeysD64, QueriesD64, kBfloat16>(pass, stream);
  }
  return LaunchTiles<KeysD128, QueriesD128, kBfloat16>(pass, stream);
}

}  // namespace attend::cuda::backward
