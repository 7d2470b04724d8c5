// SPDX-License-Identifier: Apache-2.0
//
// The two products of a tile (tile.cuh) by Hopper's wgmma. Four row warps work together; the layout
// of their scores, weights and outputs is mma.sync's. Device code for sm_90a; all threads of a
// warpgroup call each function together.

#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace attend::cuda::decode {

// Call before the barrier after which other threads multiply what this one has copied to shared
// memory.
template <class T>
__device__ __forceinline__ void ShowToProducts() {
  if constexpr (T::kWgmma) FenceAsyncProxy();
}

// S = Q K^T for the warpgroup's 64 rows at `query` and its keys at `keys`. Q could stay in
// registers, but the compiler has few to spare.
template <class T, class Element>
__device__ __forceinline__ void ScoreWgmma(uint32_t query, uint32_t keys,
                                           float (&s)[T::kKeyBlocks][4]) {
  using Product = Wgmma<T::kWarpKeys, !std::is_same_v<Element, __half>>;
  auto& d = reinterpret_cast<float(&)[T::kKeyBlocks * 4]>(s);
  const SmemTile<64> a = SmemTile<64>::AlongRows(query);
  const SmemTile<64> b = SmemTile<64>::AlongRows(keys);
  HoldRegisters(d);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < T::kDimSteps; ++k) {
    Product::template Shared<false>(d, a.At(k / 4 * T::SpanPitch(T::kRows) + k % 4 * 32),
                                    b.At(k / 4 * T::SpanPitch(T::kKeys) + k % 4 * 32), k > 0);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  HoldRegisters(d);
}

// Starts O += P V for blocks [begin, end) of eight of the warpgroup's keys, an even number. Values
// of its first key are at `values`. O may be read after FinishAccumulate.
template <class T, class Element>
__device__ __forceinline__ void StartAccumulate(uint32_t values,
                                                const uint32_t (&p)[T::kKeyBlocks][2], int begin,
                                                int end, float (&output)[T::kDim / 8][4]) {
  using Product = Wgmma<T::kDim, !std::is_same_v<Element, __half>>;
  auto& d = reinterpret_cast<float(&)[T::kDim / 2]>(output);
  const SmemTile<64> b = SmemTile<64>::DownRows(values, T::SpanPitch(T::kKeys));
  HoldRegisters(d);
  WgmmaFence();
#pragma unroll
  for (int n = begin; n < end; n += 2) {
    const uint32_t a[4] = {p[n][0], p[n][1], p[n + 1][0], p[n + 1][1]};
    Product::template Registers<true>(d, a, b.At(n * 8 * T::kRowPitch), true);
  }
  WgmmaCommit();
}
template <class T>
__device__ __forceinline__ void FinishAccumulate(float (&output)[T::kDim / 8][4]) {
  WgmmaWait<0>();
  HoldRegisters(reinterpret_cast<float(&)[T::kDim / 2]>(output));
}

}  // namespace attend::cuda::decode
