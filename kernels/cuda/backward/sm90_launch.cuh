// SPDX-License-Identifier: Apache-2.0
//
// Which tiles the backward pass by wgmma has, and its launches. Included by the file of each dtype.

#pragma once

#include <algorithm>

#include "kernels/cuda/backward/sm90_keys.cuh"
#include "kernels/cuda/backward/sm90_queries.cuh"

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

template <bool kBfloat16>
cudaError_t LaunchGradients(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  if (std::max(p.dim, p.dim_v) <= 64) {
    return LaunchTiles<KeysD64, QueriesD64, kBfloat16>(pass, stream);
  }
  return LaunchTiles<KeysD128, QueriesD128, kBfloat16>(pass, stream);
}

}  // namespace attend::cuda::backward
