// SPDX-License-Identifier: Apache-2.0
//
// Which tiles the backward pass by wgmma has, and its launches. Included by the file of each dtype.

#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/backward/sm90_keys.cuh"
#include "kernels/cuda/backward/sm90_queries.cuh"
#include "kernels/cuda/backward/sm90_split_keys.cuh"

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

template <class T>
cudaError_t Launch(void (*kernel)(Sm90Params), int64_t blocks, const BackwardPass& pass,
                   cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  Sm90Params params;
  params.pass = pass;
  const Problem& p = pass.attention.problem;
  params.cap_factor = p.softcap > 0.0f ? p.scale / p.softcap : 0.0f;
  cudaError_t error = EncodeMaps(pass, T::kRows, T::kKeys, &params.maps);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
  }
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
  cudaError_t error = cudaSuccess;
  if (g.d_k.data != nullptr || g.d_v.data != nullptr) {
    const int64_t tiles = (p.len_k + Keys::kKeys - 1) / Keys::kKeys;
    error = Launch<Keys>(KeysSm90<Keys, Consumer>, tiles * p.heads_kv * p.batch, pass, stream);
  }
  if (error == cudaSuccess && g.d_q.data != nullptr) {
    const int64_t tiles = (p.len_q + Queries::kRows - 1) / Queries::kRows;
    error = Launch<Queries>(QueriesSm90<Queries, Class>, tiles * p.heads_q * p.batch, pass,
                            stream);
  }
  return error;
}

// Which tiles there are. Most that D and Dv may be, keys, rows, stages: as the templates name them.
template <class Class>
cudaError_t LaunchClass(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) {
    return LaunchTiles<KeysTile<64, 64, 128, 128, 2>, QueriesTile<64, 64, 128, 3, 3>, Class>(
        pass, stream);
  }
  if (dim <= 96) {
    return LaunchTiles<KeysTile<96, 96, 128, 64, 3>, QueriesTile<96, 96, 128, 2, 2>, Class>(
        pass, stream);
  }
  if (dim <= 128) {
    return LaunchTiles<KeysTile<128, 128, 128, 64, 3>, QueriesTile<128, 128, 128, 2, 2>, Class>(
        pass, stream);
  }
  if (p.dim <= 192 && p.dim_v <= 128) {
    return LaunchTiles<KeysTile<192, 128, 64, 96, 2, 2>, QueriesTile<192, 128, 96, 2, 2>, Class>(
        pass, stream);
  }
  return LaunchTiles<KeysTile<256, 256, 64, 64, 2, 2>, QueriesTile<256, 256, 64, 2, 1>, Class>(
      pass, stream);
}

template <bool kBfloat16>
cudaError_t LaunchGradients(const BackwardPass& pass, cudaStream_t stream) {
  if (pass.attention.problem.softcap > 0.0f) {
    return LaunchClass<Sm90Class<kBfloat16, true>>(pass, stream);
  }
  return LaunchClass<Sm90Class<kBfloat16, false>>(pass, stream);
}

}  // namespace attend::cuda::backward
