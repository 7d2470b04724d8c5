// SPDX-License-Identifier: Apache-2.0
//
// The tiles of the backward pass by mma.sync, and its launches. Included by each source of a dtype
// and class.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/sm80_kernel.cuh"
#include "kernels/cuda/backward/sm80_measure.cuh"

namespace attend::cuda::backward {

// The tiles for one head dim. Wide ones need more shared memory than the smallest GPUs have (99 KiB
// per block).
template <MmaConfig... kConfigs>
struct MmaTiles {};

// clang-format off
using Queries64 = MmaTiles<MmaConfig{Leaves::kQueries, 64, 64, 4, 2, 96, 48, 2}>;
using Keys64 = MmaTiles<MmaConfig{Leaves::kKeysAndValues, 64, 64, 4, 2, 64, 32, 2}>;
using Queries128 = MmaTiles<MmaConfig{Leaves::kQueries, 128, 128, 4, 2, 32, 32, 2}>;
using Keys128 = MmaTiles<MmaConfig{Leaves::kKeysAndValues, 128, 128, 8, 2, 64, 32, 1, 2},
                         MmaConfig{Leaves::kKeysAndValues, 128, 128, 4, 1, 48, 48, 2}>;
using Queries192 = MmaTiles<MmaConfig{Leaves::kQueries, 192, 128, 8, 1, 64, 64, 1},
                            MmaConfig{Leaves::kQueries, 192, 128, 4, 1, 32, 32, 2}>;
using Keys192 = MmaTiles<MmaConfig{Leaves::kKeysAndValues, 192, 128, 4, 1, 32, 32, 2}>;
// With score terms, which need registers.
using Queries64Terms = MmaTiles<MmaConfig{Leaves::kQueries, 64, 64, 4, 2, 64, 32, 2}>;
using Keys64Terms = MmaTiles<MmaConfig{Leaves::kKeysAndValues, 64, 64, 4, 1, 64, 64, 2}>;
using Queries128Terms = MmaTiles<MmaConfig{Leaves::kQueries, 128, 128, 4, 1, 64, 64, 2}>;
using Keys128Terms = MmaTiles<MmaConfig{Leaves::kKeysAndValues, 128, 128, 4, 1, 32, 32, 2}>;
using Queries192Terms = MmaTiles<MmaConfig{Leaves::kQueries, 192, 128, 4, 1, 32, 32, 2}>;
using Keys192Terms = MmaTiles<MmaConfig{Leaves::kKeysAndValues, 192, 128, 4, 1, 32, 16, 2}>;
using Queries256 = MmaTiles<MmaConfig{Leaves::kQueries, 256, 256, 8, 1, 32, 32, 1},
                            MmaConfig{Leaves::kQueries, 256, 256, 4, 1, 16, 16, 2}>;
constexpr MmaConfig kKeysAndValues256{Leaves::kKeysAndValues, 256, 256, 8, 1, 64, 32, 1, 2};
using KeysAndValues256 = MmaTiles<kKeysAndValues256>;
using Measure64 = MmaTiles<MmaConfig{Leaves::kMeasure, 64, 64, 4, 2, 64, 32, 2}>;
using Measure128 = MmaTiles<MmaConfig{Leaves::kMeasure, 128, 128, 4, 2, 32, 32, 2}>;
using Measure192 = MmaTiles<MmaConfig{Leaves::kMeasure, 192, 128, 8, 1, 64, 64, 1},
                            MmaConfig{Leaves::kMeasure, 192, 128, 4, 1, 32, 32, 2}>;
using Measure256 = MmaTiles<MmaConfig{Leaves::kMeasure, 256, 256, 8, 1, 32, 32, 1},
                            MmaConfig{Leaves::kMeasure, 256, 256, 4, 1, 16, 16, 2}>;
// For GPUs with less shared memory.
using Keys256 = MmaTiles<MmaConfig{Leaves::kKeys, 256, 256, 4, 1, 16, 16, 2}>;
using Values256 = MmaTiles<MmaConfig{Leaves::kValues, 256, 256, 4, 1, 32, 32, 2}>;
// clang-format on

// Number of heads whose tiles run side by side. Without a mask one head at a time caches best; with
// one, the longest tiles should start first, over as many heads as the L2 cache holds.
inline int SectionOf(const Problem& p, bool owns_keys, int64_t heads, int tiles) {
  constexpr int64_t kSectionBytes = int64_t{40} << 20;  // Ampere's L2 cache
  constexpr int64_t kSectionTiles = 400;                // three per multiprocessor on Hopper
  if (p.mask.unrestricted()) return 1;
  const int64_t rows = owns_keys ? p.len_q * p.group() : p.len_k;
  const int64_t bytes = std::max<int64_t>(2 * rows * (p.dim + p.dim_v), 1);
  int64_t section = 1;
  while (section < heads &&
         (2 * section * bytes <= kSectionBytes || section * tiles < kSectionTiles)) {
    section *= 2;
  }
  return static_cast<int>(std::min(section, heads));
}

// Usually there is nothing to measure: enough blocks to fill a GPU, as more would only take longer
// to find that out.
inline constexpr int64_t kMeasureBlocks = 264;

template <MmaConfig kConfig, class Element, Class kClass>
cudaError_t LaunchTile(Passes passes, cudaStream_t stream) {
  using T = MmaTile<kConfig>;
  std::vector<ItemBlocks<MmaParams>> items;
  for (const BackwardPass& pass : passes) {
    const Problem& p = pass.attention.problem;
    const int64_t heads = p.batch * (T::kOwnsKeys ? p.heads_kv : p.heads_q);
    const int64_t rows = T::kOwnsKeys ? p.len_k : p.len_q;
    const auto tiles = static_cast<int>((rows + T::kOwn - 1) / T::kOwn);
    items.push_back({{pass, tiles, SectionOf(p, T::kOwnsKeys, heads, tiles)}, heads * tiles});
  }
  if constexpr (T::kMeasures) {
    return LaunchItems(MeasureSm80<T, Element, kClass, 1>,
                       MeasureSm80<T, Element, kClass, kItemsMax>, std::move(items),
                       {T::kThreads, T::kSharedBytes, kMeasureBlocks / 2 * T::kBlocks}, stream);
  } else {
    return LaunchItems(GradientsSm80<T, Element, kClass, 1>,
                       GradientsSm80<T, Element, kClass, kItemsMax>, std::move(items),
                       {T::kThreads, T::kSharedBytes}, stream);
  }
}

// A block's shared memory: the tile's and the kernel's own.
template <MmaConfig kConfig>
inline constexpr int kBlockBytes = MmaTile<kConfig>::kSharedBytes +
                                   static_cast<int>(sizeof(MmaWork));

// Launches the first tile that fits the device's shared memory, or the last.
template <class Element, Class kClass, MmaConfig kFirst, MmaConfig... kOthers>
cudaError_t LaunchFitting(MmaTiles<kFirst, kOthers...>, Passes passes, cudaStream_t stream) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (passes.front().block_bytes_max < kBlockBytes<kFirst>) {
      return LaunchFitting<Element, kClass>(MmaTiles<kOthers...>{}, passes, stream);
    }
  }
  return LaunchTile<kFirst, Element, kClass>(passes, stream);
}

// Whether the last tile runs everywhere.
template <MmaConfig kFirst, MmaConfig... kOthers>
constexpr bool FitAll(MmaTiles<kFirst, kOthers...>) {
  constexpr int kSmallest = 99 * 1024;
  if constexpr (sizeof...(kOthers) > 0) {
    return FitAll(MmaTiles<kOthers...>{});
  } else {
    return kBlockBytes<kFirst> <= kSmallest;
  }
}
static_assert(FitAll(Queries64{}) && FitAll(Keys64{}) && FitAll(Queries128{}) &&
              FitAll(Keys128{}) && FitAll(Queries192{}) && FitAll(Keys192{}) &&
              FitAll(Keys192Terms{}) && FitAll(Queries64Terms{}) && FitAll(Keys64Terms{}) &&
              FitAll(Queries128Terms{}) && FitAll(Keys128Terms{}) && FitAll(Queries192Terms{}) &&
              FitAll(Queries256{}) && FitAll(Keys256{}) && FitAll(Values256{}) &&
              FitAll(Measure64{}) && FitAll(Measure128{}) && FitAll(Measure192{}) &&
              FitAll(Measure256{}));

template <Class kClass, class Plain, class Terms>
using TilesOf = std::conditional_t<kClass == Class::kPlain, Plain, Terms>;

template <class Element, Class kClass>
cudaError_t LaunchMma(Passes passes, Sm80Task task, cudaStream_t stream) {
  const Problem& p = passes.front().attention.problem;
  const Gradients& g = passes.front().gradients;
  cudaError_t error = cudaSuccess;
  const auto launch = [&](auto tiles, bool wanted) {
    if (error != cudaSuccess || !wanted) return;
    error = LaunchFitting<Element, kClass>(tiles, passes, stream);
  };
  const bool measures = task == Sm80Task::kMeasure;
  const bool d_q = !measures && g.d_q.data != nullptr;
  const bool d_k = !measures && g.d_k.data != nullptr;
  const bool d_v = !measures && g.d_v.data != nullptr;
  if (std::max(p.dim, p.dim_v) <= 64) {
    launch(TilesOf<kClass, Keys64, Keys64Terms>{}, d_k || d_v);
    launch(TilesOf<kClass, Queries64, Queries64Terms>{}, d_q);
    launch(Measure64{}, measures);
  } else if (std::max(p.dim, p.dim_v) <= 128) {
    launch(TilesOf<kClass, Keys128, Keys128Terms>{}, d_k || d_v);
    launch(TilesOf<kClass, Queries128, Queries128Terms>{}, d_q);
    launch(Measure128{}, measures);
  } else if (p.dim <= 192 && p.dim_v <= 128) {
    launch(TilesOf<kClass, Keys192, Keys192Terms>{}, d_k || d_v);
    launch(TilesOf<kClass, Queries192, Queries192Terms>{}, d_q);
    launch(Measure192{}, measures);
  } else {
    const bool fits = kBlockBytes<kKeysAndValues256> <= passes.front().block_bytes_max;
    launch(KeysAndValues256{}, fits && (d_k || d_v));
    launch(Keys256{}, !fits && d_k);
    launch(Values256{}, !fits && d_v);
    launch(Queries256{}, d_q);
    launch(Measure256{}, measures);
  }
  return error;
}

}  // namespace attend::cuda::backward
