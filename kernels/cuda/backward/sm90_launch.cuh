// SPDX-License-Identifier: Apache-2.0
//
// The tiles of the backward pass by wgmma, and its launches. Included by each dtype's source.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/sm90_item.cuh"
#include "kernels/cuda/backward/sm90_keys.cuh"
#include "kernels/cuda/backward/sm90_queries.cuh"
#include "kernels/cuda/backward/sm90_split_keys.cuh"
#include "kernels/cuda/backward/sm90_turns.cuh"

namespace attend::cuda::backward {

template <class T, bool kOwnsKeys>
cudaError_t Launch(void (*single)(LaunchList<Sm90Params, 1>),
                   void (*several)(LaunchList<Sm90Params, kItemsMax>), Passes passes,
                   cudaStream_t stream) {
  std::vector<Sm90Item> items(passes.size());
  for (size_t n = 0; n < passes.size(); ++n) {
    const cudaError_t error = MakeItem<T, kOwnsKeys>(passes[n], &items[n]);
    if (error != cudaSuccess) return error;
  }
  return LaunchItems(single, several, std::move(items), {kThreads, T::kSharedBytes}, stream);
}

// Keys and Queries: tiles.
template <class Keys, class Queries, class Class>
cudaError_t LaunchTiles(Passes passes, cudaStream_t stream) {
  using Consumer = std::conditional_t<(Keys::kExchanges > 0), SplitKeysConsumer<Keys, Class>,
                                      KeysConsumer<Keys, Class>>;
  const Gradients& g = passes.front().gradients;
  cudaError_t error = cudaSuccess;
  if (g.d_k.data != nullptr || g.d_v.data != nullptr) {
    // Wide tiles with dropout have no registers for the address of an item's parameters.
    void (*several)(LaunchList<Sm90Params, kItemsMax>) = nullptr;
    if constexpr (!Class::kDropout || Keys::kD < 128) several = KeysSm90<Keys, Consumer, kItemsMax>;
    error = Launch<Keys, true>(KeysSm90<Keys, Consumer, 1>, several, passes, stream);
  }
  if (error == cudaSuccess && g.d_q.data != nullptr) {
    error = Launch<Queries, false>(QueriesSm90<Queries, Class, 1>,
                                   QueriesSm90<Queries, Class, kItemsMax>, passes, stream);
  }
  return error;
}

// The tiles: upper bounds of D and Dv, keys, rows, stages, as in the templates. Extra features of a
// class need registers, so some of its tiles are smaller.
template <class Class>
cudaError_t LaunchClass(Passes passes, cudaStream_t stream) {
  constexpr bool kPlain = !Class::kSoftcap;
  const Problem& p = passes.front().attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) {
    constexpr int kPairs = kPlain ? 128 : 64;
    return LaunchTiles<KeysTile<64, 64, 128, kPairs, 2>, QueriesTile<64, 64, kPairs, 3, 3>, Class>(
        passes, stream);
  }
  if (dim <= 96) {
    return LaunchTiles<KeysTile<96, 96, 128, kPlain ? 80 : 64, 3>, QueriesTile<96, 96, 128, 2, 2>,
                       Class>(passes, stream);
  }
  if (dim <= 128) {
    using Keys = std::conditional_t<kPlain, KeysTile<128, 128, 128, 64, 3>,
                                    KeysTile<128, 128, 64, 128, 2, 1>>;
    return LaunchTiles<Keys, QueriesTile<128, 128, 128, 2, 2>, Class>(passes, stream);
  }
  if (p.dim <= 192 && p.dim_v <= 128) {
    return LaunchTiles<KeysTile<192, 128, 64, 96, 2, 2, kPlain ? 12 : 0>,
                       QueriesTile<192, 128, kPlain ? 96 : 80, 2, 2>, Class>(passes, stream);
  }
  return LaunchTiles<
      KeysTile<256, 256, 64, 64, 2, 2, kPlain ? 5 : 0>,
      std::conditional_t<kPlain, QueriesTile<256, 256, 64, 2, 1>, QueriesTile<256, 256, 32, 3, 3>>,
      Class>(passes, stream);
}

// With dropout: D and Dv up to 128.
template <class Class>
cudaError_t LaunchDropoutClass(Passes passes, cudaStream_t stream) {
  const Problem& p = passes.front().attention.problem;
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) {
    return LaunchTiles<KeysTile<64, 64, 64, 128, 2, 2>, QueriesTile<64, 64, 64, 3, 3>, Class>(
        passes, stream);
  }
  if (dim <= 96) {
    return LaunchTiles<KeysTile<96, 96, 64, 128, 2, 1>, QueriesTile<96, 96, 64, 2, 2>, Class>(
        passes, stream);
  }
  return LaunchTiles<KeysTile<128, 128, 64, 128, 2, 1>, QueriesTile<128, 128, 64, 2, 2>, Class>(
      passes, stream);
}

// One kernel for all gradients, then dQ from its sums.
template <class Tile, bool kBfloat16>
cudaError_t LaunchTurns(Passes passes, cudaStream_t stream) {
  std::vector<Sm90Item> items(passes.size());
  std::vector<ItemBlocks<PassItem>> narrow;
  for (size_t n = 0; n < passes.size(); ++n) {
    const cudaError_t error = MakeItem<Tile, true>(passes[n], &items[n]);
    if (error != cudaSuccess) return error;
    const Problem& p = passes[n].attention.problem;
    items[n].item.section = HeadsAtATime(p);
    narrow.push_back(
        {{passes[n]}, (p.len_q + Tile::kRows - 1) / Tile::kRows * p.heads_q * p.batch});
  }
  const cudaError_t error =
      LaunchItems(TurnsSm90<Tile, kBfloat16, 1>, TurnsSm90<Tile, kBfloat16, kItemsMax>,
                  std::move(items), {kThreads, Tile::kSharedBytes, kTurnsBlocks}, stream);
  if (error != cudaSuccess) return error;
  return LaunchItems(NarrowQueries<Tile, kBfloat16, 1>, NarrowQueries<Tile, kBfloat16, kItemsMax>,
                     std::move(narrow), {128 * kConsumers}, stream);
}

template <bool kBfloat16>
cudaError_t LaunchGradients(Passes passes, cudaStream_t stream) {
  const Problem& p = passes.front().attention.problem;
  if (passes.front().sums != nullptr) {
    const int64_t dim = std::max(p.dim, p.dim_v);
    if (dim <= 64) return LaunchTurns<TurnsTile<64>, kBfloat16>(passes, stream);
    if (dim <= 96) return LaunchTurns<TurnsTile<96>, kBfloat16>(passes, stream);
    return LaunchTurns<TurnsTile<128>, kBfloat16>(passes, stream);
  }
  if (p.softcap > 0.0f) return LaunchClass<Sm90Class<kBfloat16, true>>(passes, stream);
  return LaunchClass<Sm90Class<kBfloat16>>(passes, stream);
}

template <bool kBfloat16>
cudaError_t LaunchDropoutGradients(Passes passes, cudaStream_t stream) {
  if (passes.front().attention.problem.softcap > 0.0f) {
    return LaunchDropoutClass<Sm90Class<kBfloat16, true, true>>(passes, stream);
  }
  return LaunchDropoutClass<Sm90Class<kBfloat16, false, true>>(passes, stream);
}

}  // namespace attend::cuda::backward
