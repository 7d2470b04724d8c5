// SPDX-License-Identifier: Apache-2.0
//
// Which tile serves which head dim: the only place of cuda_flash_sm80 that tuning changes. Measured
// on an H200; device code behind it, so included only by flash_sm80_*.cu.

#pragma once

#include <span>
#include <string>
#include <tuple>

#include "kernels/cuda/sm80/kernel.cuh"

namespace attend::cuda::sm80 {

// "rows128_keys64_threads256_query128"
template <class T>
std::string TileName() {
  std::string name = "rows" + std::to_string(T::kRows) + "_keys" + std::to_string(T::kKeys) +
                     "_threads" + std::to_string(T::kThreads);
  if (T::kQueryColumns > 0) name += "_query" + std::to_string(T::kQueryColumns);
  return name;
}

template <class T, class Element, bool kGeneral>
FlashVariant Variant() {
  static const std::string name = TileName<T>();
  return MakeVariant<T>(name, reinterpret_cast<const void*>(&FlashSm80Kernel<T, Element, kGeneral>),
                        T::kSharedBytes);
}

// The tiles of one head dim, the one to take first.
template <class Element, bool kGeneral, class... T>
std::span<const FlashVariant> Variants() {
  // The last one runs everywhere: 99 KiB is what the smallest GPUs allow, BlockWork included.
  using Last = std::tuple_element_t<sizeof...(T) - 1, std::tuple<T...>>;
  static_assert(Last::kSharedBytes + Last::kReferenceBytes + 2 * sizeof(BlockWork) <= 99 * 1024);
  static const FlashVariant variants[] = {Variant<T, Element, kGeneral>()...};
  return variants;
}

// Few tiles: they leave multiprocessors idle, so that half of the rows take half of the time.
using D64 = Tile<TileConfig{.head_dim = 64, .slices = 2, .keys = 128}>;
using D64Few =
    Tile<TileConfig{.head_dim = 64, .slices = 1, .keys = 128, .blocks = 3, .query_columns = 64}>;

template <class Element>
std::span<const FlashVariant> PlainVariants(int dim, bool few_tiles) {
  switch (dim) {
    case 32:
      return Variants<
          Element, false,
          Tile<TileConfig{.head_dim = 32, .slices = 2, .keys = 128, .query_columns = 32}>>();
    case 64:
      return few_tiles ? Variants<Element, false, D64Few, D64>()
                       : Variants<Element, false, D64, D64Few>();
    case 96:
      return Variants<Element, false, Tile<TileConfig{.head_dim = 96, .slices = 2, .keys = 96}>>();
    case 128:
      return Variants<Element, false, Tile<TileConfig{.head_dim = 128, .slices = 2, .keys = 64}>>();
    // The first of these needs Hopper's shared memory.
    case 192:
      return Variants<
          Element, false,
          Tile<TileConfig{.head_dim = 192,
                          .slices = 1,
                          .keys = 96,
                          .warps = 8,
                          .blocks = 1,
                          .query_columns = 192}>,
          Tile<TileConfig{.head_dim = 192, .slices = 1, .keys = 48, .query_columns = 192}>>();
    default:
      return Variants<
          Element, false,
          Tile<TileConfig{.head_dim = 256,
                          .slices = 1,
                          .keys = 64,
                          .warps = 8,
                          .blocks = 1,
                          .query_columns = 128}>,
          Tile<TileConfig{
              .head_dim = 256, .slices = 1, .keys = 64, .stages = 1, .query_columns = 128}>>();
  }
}

template <class Element>
std::span<const FlashVariant> GeneralVariants(int dim) {
  switch (dim) {
    case 32:
      return Variants<
          Element, true,
          Tile<TileConfig{.head_dim = 32, .slices = 2, .keys = 64, .query_columns = 32}>>();
    case 64:
      return Variants<
          Element, true,
          Tile<TileConfig{.head_dim = 64, .slices = 2, .keys = 64, .query_columns = 64}>>();
    case 96:
      return Variants<Element, true, Tile<TileConfig{.head_dim = 96, .slices = 2, .keys = 64}>>();
    case 128:
      return Variants<Element, true, Tile<TileConfig{.head_dim = 128, .slices = 2, .keys = 48}>>();
    case 192:
      return Variants<Element, true,
                      Tile<TileConfig{.head_dim = 192, .slices = 1, .keys = 64, .stages = 1}>>();
    default:
      return Variants<Element, true,
                      Tile<TileConfig{.head_dim = 256, .slices = 1, .keys = 64, .stages = 1}>>();
  }
}

}  // namespace attend::cuda::sm80
