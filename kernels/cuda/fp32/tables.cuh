// SPDX-License-Identifier: Apache-2.0
//
// Tiles that the plain and general instances of cuda_flash_fp32 share, and how lists of tiles
// become variants. Includes device code, so only plain.cu and general.cu include it.

#pragma once

#include <span>
#include <string>
#include <tuple>

#include "kernels/cuda/fp32/kernel.cuh"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda::fp32 {

using D32 = Tile<TileConfig{.head_dim = 32, .lane_cols = 8, .warps = 4, .blocks = 2}>;
using D128 = Tile<TileConfig{.head_dim = 128, .lane_cols = 16, .warps = 8}>;
using D128Small = Tile<TileConfig{
    .head_dim = 128, .lane_cols = 8, .warps = 4, .thread_rows = 4, .keys = 32, .blocks = 2}>;
using D256 = Tile<TileConfig{.head_dim = 256, .lane_cols = 16, .warps = 8, .thread_rows = 4}>;
using D256Small = Tile<TileConfig{
    .head_dim = 256, .lane_cols = 8, .warps = 2, .thread_rows = 4, .keys = 16, .blocks = 2}>;

template <class T, bool kGeneral>
FlashVariant Variant() {
  static const std::string name = TileName<T>();
  return MakeVariant<T>(name, reinterpret_cast<const void*>(&FlashFp32Kernel<T, kGeneral>),
                        T::kSharedBytes, kFp32BlockBytes<T> - T::kSharedBytes);
}

// The tiles for one head dim, the preferred one first; the last one runs everywhere, within 99 KiB.
// All are also compiled for paged K and V: another tile would round differently, and paging must
// not change a bit.
template <bool kGeneral, class... T>
std::span<const FlashVariant> Variants(bool paged) {
  using Last = std::tuple_element_t<sizeof...(T) - 1, std::tuple<T...>>;
  static_assert(kFp32BlockBytes<Last> <= 99 * 1024);
  static const FlashVariant dense[] = {Variant<T, kGeneral>()...};
  static const FlashVariant in_pages[] = {Variant<typename T::Paged, kGeneral>()...};
  if (paged) return in_pages;
  return dense;
}

}  // namespace attend::cuda::fp32
