// SPDX-License-Identifier: Apache-2.0
//
// The tiles that measure rows by wgmma, and their launch. Included by each dtype's source.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/sm90_item.cuh"
#include "kernels/cuda/backward/sm90_measure.cuh"

namespace attend::cuda::backward {

// per launch: enough to fill a GPU
inline constexpr int64_t kMeasureBlocks = 132;

template <class T, bool kBfloat16>
cudaError_t LaunchMeasureTile(Passes passes, cudaStream_t stream) {
  using Class = Sm90Class<kBfloat16>;
  std::vector<Sm90Item> items(passes.size());
  for (size_t n = 0; n < passes.size(); ++n) {
    const cudaError_t error = MakeItem<T, false>(passes[n], &items[n]);
    if (error != cudaSuccess) return error;
  }
  return LaunchItems(MeasureSm90<T, Class, 1>, MeasureSm90<T, Class, kItemsMax>, std::move(items),
                     {kMeasureThreads, T::kSharedBytes, kMeasureBlocks}, stream);
}

template <bool kBfloat16>
cudaError_t LaunchMeasure(Passes passes, cudaStream_t stream) {
  const Problem& p = passes.front().attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) {
    return LaunchMeasureTile<QueriesTile<64, 64, 128, 3, 3>, kBfloat16>(passes, stream);
  }
  if (dim <= 96) {
    return LaunchMeasureTile<QueriesTile<96, 96, 128, 2, 2>, kBfloat16>(passes, stream);
  }
  if (dim <= 128) {
    return LaunchMeasureTile<QueriesTile<128, 128, 128, 2, 2>, kBfloat16>(passes, stream);
  }
  if (p.dim <= 192 && p.dim_v <= 128) {
    return LaunchMeasureTile<QueriesTile<192, 128, 96, 2, 2>, kBfloat16>(passes, stream);
  }
  return LaunchMeasureTile<QueriesTile<256, 256, 64, 2, 1>, kBfloat16>(passes, stream);
}

}  // namespace attend::cuda::backward
