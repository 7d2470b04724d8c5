// SPDX-License-Identifier: Apache-2.0
//
// Which tile serves which head dim: the only place of cuda_flash_sm80 that tuning changes. Measured
// on an H200; device code behind it, so included only by flash_sm80_*.cu.
//
//                 dim, warps, slices, keys, blocks, stages, columns of Q in registers

#pragma once

#include <span>

#include "kernels/cuda/flash_sm80_kernel.cuh"

namespace attend::cuda::sm80 {

template <class T, class Element, bool kGeneral>
FlashVariant Variant(std::string_view name) {
  return MakeVariant<T>(name, reinterpret_cast<const void*>(&FlashSm80Kernel<T, Element, kGeneral>),
                        T::kSharedBytes);
}

template <class Element>
std::span<const FlashVariant> PlainVariants(int dim) {
  static const FlashVariant variants[] = {
      Variant<Tile<32, 4, 2, 128, 2, 2, 32>, Element, false>("rows128_keys128_threads128"),
      Variant<Tile<64, 4, 2, 128, 2, 2, 0>, Element, false>("rows128_keys128_threads128"),
      Variant<Tile<96, 4, 2, 96, 2, 2, 0>, Element, false>("rows128_keys96_threads128"),
      Variant<Tile<128, 4, 2, 64, 2, 2, 0>, Element, false>("rows128_keys64_threads128"),
      Variant<Tile<192, 4, 1, 48, 2, 2, 192>, Element, false>("rows64_keys48_threads128"),
      Variant<Tile<256, 4, 1, 64, 2, 1, 0>, Element, false>("rows64_keys64_threads128"),
  };
  return {&variants[dim <= 128 ? dim / 32 - 1 : dim / 64 + 1], 1};
}

template <class Element>
std::span<const FlashVariant> GeneralVariants(int dim) {
  static const FlashVariant variants[] = {
      Variant<Tile<32, 4, 2, 64, 2, 2, 32>, Element, true>("rows128_keys64_threads128"),
      Variant<Tile<64, 4, 2, 64, 2, 2, 64>, Element, true>("rows128_keys64_threads128"),
      Variant<Tile<96, 4, 2, 64, 2, 2, 0>, Element, true>("rows128_keys64_threads128"),
      Variant<Tile<128, 4, 2, 48, 2, 2, 0>, Element, true>("rows128_keys48_threads128"),
      Variant<Tile<192, 4, 1, 64, 2, 1, 0>, Element, true>("rows64_keys64_threads128"),
      Variant<Tile<256, 4, 1, 64, 2, 1, 0>, Element, true>("rows64_keys64_threads128"),
  };
  return {&variants[dim <= 128 ? dim / 32 - 1 : dim / 64 + 1], 1};
}

}  // namespace attend::cuda::sm80
