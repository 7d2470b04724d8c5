// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80: which tile serves which head dim, the only place that tuning changes. Measured
// on an H200. Refers to device code, so only the .cu files beside it include it.

#pragma once

#include <span>
#include <string>
#include <tuple>

#include "kernels/cuda/sm80/kernel.cuh"

namespace attend::cuda::sm80 {

// The kernel's own shared memory; a launch's begins at a multiple of 128. The smallest GPUs allow a
// block 99 KiB in all.
template <class T>
inline constexpr int kOwnBytes = static_cast<int>(T::kReferenceBytes + 2 * sizeof(BlockWork) +
                                                  127) /
                                 128 * 128;
template <class T>
constexpr bool RunsEverywhere() {
  return T::kSharedBytes + kOwnBytes<T> <= 99 * 1024;
}

template <class T, class Element, bool kGeneral>
FlashVariant Variant() {
  // "rows128_keys64_threads256_query128"
  static const std::string name =
      TileName<T>() + (T::kQueryColumns > 0 ? "_query" + std::to_string(T::kQueryColumns) : "");
  return MakeVariant<T>(name, reinterpret_cast<const void*>(&FlashSm80Kernel<T, Element, kGeneral>),
                        T::kSharedBytes, kOwnBytes<T>);
}

// The tiles for one head dim, the preferred one first. All are also compiled for paged K and V:
// another tile would round differently, and paging must not change a bit.
template <class Element, bool kGeneral, class... T>
std::span<const FlashVariant> Variants(bool paged) {
  static_assert(RunsEverywhere<std::tuple_element_t<sizeof...(T) - 1, std::tuple<T...>>>());
  static const FlashVariant dense[] = {Variant<T, Element, kGeneral>()...};
  static const FlashVariant in_pages[] = {Variant<typename T::Paged, Element, kGeneral>()...};
  if (paged) return in_pages;
  return dense;
}

using D32 = Tile<TileConfig{.head_dim = 32, .slices = 2, .keys = 128, .query_columns = 32}>;
using D64 = Tile<TileConfig{.head_dim = 64, .slices = 2, .keys = 128}>;
using D64Few =
    Tile<TileConfig{.head_dim = 64, .slices = 1, .keys = 128, .blocks = 3, .query_columns = 64}>;
using D96 = Tile<TileConfig{.head_dim = 96, .slices = 2, .keys = 96}>;
using D128 = Tile<TileConfig{.head_dim = 128, .slices = 2, .keys = 64}>;
using D192 = Tile<TileConfig{.head_dim = 192, .slices = 1, .keys = 48, .query_columns = 192}>;
using D256 =
    Tile<TileConfig{.head_dim = 256, .slices = 1, .keys = 64, .stages = 1, .query_columns = 128}>;
// These need Hopper's shared memory.
using D192Wide = Tile<TileConfig{
    .head_dim = 192, .slices = 1, .keys = 96, .warps = 8, .blocks = 1, .query_columns = 192}>;
using D256Wide = Tile<TileConfig{
    .head_dim = 256, .slices = 1, .keys = 64, .warps = 8, .blocks = 1, .query_columns = 128}>;

// Few tiles leave multiprocessors idle, so tiles of half the rows take half the time.
template <class Element>
std::span<const FlashVariant> PlainVariants(int dim, bool few_tiles, bool paged) {
  if (dim == 32) return Variants<Element, false, D32>(paged);
  if (dim == 64 && few_tiles) return Variants<Element, false, D64Few, D64>(paged);
  if (dim == 64) return Variants<Element, false, D64, D64Few>(paged);
  if (dim == 96) return Variants<Element, false, D96>(paged);
  if (dim == 128) return Variants<Element, false, D128>(paged);
  if (dim == 192) return Variants<Element, false, D192Wide, D192>(paged);
  return Variants<Element, false, D256Wide, D256>(paged);
}

using General32 = Tile<TileConfig{.head_dim = 32, .slices = 2, .keys = 64, .query_columns = 32}>;
using General64 = Tile<TileConfig{.head_dim = 64, .slices = 2, .keys = 64, .query_columns = 64}>;
using General96 = Tile<TileConfig{.head_dim = 96, .slices = 2, .keys = 64}>;
using General128 = Tile<TileConfig{.head_dim = 128, .slices = 2, .keys = 48}>;
using General192 = Tile<TileConfig{.head_dim = 192, .slices = 1, .keys = 64, .stages = 1}>;
using General256 = Tile<TileConfig{.head_dim = 256, .slices = 1, .keys = 64, .stages = 1}>;

template <class Element>
std::span<const FlashVariant> GeneralVariants(int dim, bool paged) {
  if (dim == 32) return Variants<Element, true, General32>(paged);
  if (dim == 64) return Variants<Element, true, General64>(paged);
  if (dim == 96) return Variants<Element, true, General96>(paged);
  if (dim == 128) return Variants<Element, true, General128>(paged);
  if (dim == 192) return Variants<Element, true, General192>(paged);
  return Variants<Element, true, General256>(paged);
}

using Dropout64 =
    Tile<TileConfig{.head_dim = 64, .slices = 2, .keys = 64, .query_columns = 32, .dropout = true}>;
using Dropout128 = Tile<TileConfig{.head_dim = 128, .slices = 2, .keys = 32, .dropout = true}>;
using Dropout256 =
    Tile<TileConfig{.head_dim = 256, .slices = 1, .keys = 64, .stages = 1, .dropout = true}>;

// All terms with dropout, not paged. Fewer head dims, as those in between are rare.
template <class Element, class T>
std::span<const FlashVariant> DropoutVariant() {
  static_assert(RunsEverywhere<T>());
  static const FlashVariant list[] = {Variant<T, Element, true>()};
  return list;
}
template <class Element>
std::span<const FlashVariant> DropoutVariants(int dim) {
  if (dim <= 64) return DropoutVariant<Element, Dropout64>();
  if (dim <= 128) return DropoutVariant<Element, Dropout128>();
  return DropoutVariant<Element, Dropout256>();
}

}  // namespace attend::cuda::sm80
