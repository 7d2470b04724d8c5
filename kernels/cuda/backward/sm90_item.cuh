// SPDX-License-Identifier: Apache-2.0
//
// Builds an item of a launch of the backward pass by wgmma, on the host.

#pragma once

#include <algorithm>

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

inline cudaError_t EncodeMaps(const BackwardPass& pass, int rows, int keys, TensorMaps* maps) {
  const TensorBoxes boxes{{rows, kCols}, {keys, kCols}, {keys, kCols}, {}};
  // dO as the Q of another attention.
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

// Bytes of the tensors that a section's blocks walk: a part of the L2 cache, each half of which
// keeps its own copy.
inline constexpr int64_t kSectionBytes = int64_t{16} << 20;

using Sm90Item = ItemBlocks<Sm90Params>;

// Whether T's blocks own keys, or query rows.
template <class T, bool kOwnsKeys>
cudaError_t MakeItem(const BackwardPass& pass, Sm90Item* item) {
  const Problem& p = pass.attention.problem;
  Sm90Params& params = item->item;
  params.pass = pass;
  params.cap_factor = CapFactor(p);
  params.kept_scale = DropoutScale(p.dropout);
  params.heads = (kOwnsKeys ? p.heads_kv : p.heads_q) * p.batch;
  const int64_t tiles =
      kOwnsKeys ? (p.len_k + T::kKeys - 1) / T::kKeys : (p.len_q + T::kRows - 1) / T::kRows;
  item->blocks = params.heads * tiles;
  if (p.heads_kv > 0) params.group = static_cast<int>(p.group());
  if (item->blocks == 0) return cudaSuccess;
  const int64_t walked = 2 * (p.dim + p.dim_v) *  // bytes, by one head
                         (kOwnsKeys ? p.group() * p.len_q : p.len_k * p.heads_kv / p.heads_q);
  params.section = std::max<int64_t>(kSectionBytes / std::max<int64_t>(walked, 1), 1);
  return EncodeMaps(pass, T::kRows, T::kKeys, &params.maps);
}

}  // namespace attend::cuda::backward
