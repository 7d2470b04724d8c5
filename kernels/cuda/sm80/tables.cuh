// SPDX-License-Identifier: Apache-2.0
//
// Which tile serves which head dim: the only place of cuda_flash_sm80 that tuning changes. Measured
// on an H200; device code behind it, so included only by flash_sm80_*.cu.
//
//                 dim, warps, slices, keys, blocks, stages, columns of Q in registers

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
using D64 = Tile<64, 4, 2, 128, 2, 2, 0>;
using D64Few = Tile<64, 4, 1, 128, 3, 2, 64>;

template <class Element>
std::span<const FlashVariant> PlainVariants(int dim, bool few_tiles) {
  switch (dim) {
    case 32:
      return Variants<Element, false, Tile<32, 4, 2, 128, 2, 2, 32>>();
    case 64:
      return few_tiles ? Variants<Element, false, D64Few, D64>()
                       : Variants<Element, false, D64, D64Few>();
    case 96:
      return Variants<Element, false, Tile<96, 4, 2, 96, 2, 2, 0>>();
    case 128:
      return Variants<Element, false, Tile<128, 4, 2, 64, 2, 2, 0>>();
    // The first of these needs Hopper's shared memory.
    case 192:
      return Variants<Element, false, Tile<192, 8, 1, 96, 1, 2, 192>,
                      Tile<192, 4, 1, 48, 2, 2, 192>>();
    default:
      return Variants<Element, false, Tile<256, 8, 1, 64, 1, 2, 128>,
                      Tile<256, 4, 1, 64, 2, 1, 128>>();
  }
}

template <class Element>
std::span<const FlashVariant> GeneralVariants(int dim) {
  switch (dim) {
    case 32:
      return Variants<Element, true, Tile<32, 4, 2, 64, 2, 2, 32>>();
    case 64:
      return Variants<Element, true, Tile<64, 4, 2, 64, 2, 2, 64>>();
    case 96:
      return Variants<Element, true, Tile<96, 4, 2, 64, 2, 2, 0>>();
    case 128:
      return Variants<Element, true, Tile<128, 4, 2, 48, 2, 2, 0>>();
    case 192:
      return Variants<Element, true, Tile<192, 4, 1, 64, 2, 1, 0>>();
    default:
      return Variants<Element, true, Tile<256, 4, 1, 64, 2, 1, 0>>();
  }
}

}  // namespace attend::cuda::sm80
