// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_fp32 for fp32 data without softcap, bias and ALiBi: the hot ones.

#include "kernels/cuda/fp32/kernel.cuh"
#include "kernels/cuda/fp32/variants.h"

namespace attend::cuda {
namespace {

template <class T>
FlashVariant Variant(std::string_view name) {
  return MakeVariant<T>(name, reinterpret_cast<const void*>(&FlashFp32Kernel<T, false>),
                        T::kSharedBytes);
}

}  // namespace

std::span<const FlashVariant> PlainFlashVariants(int dim_max) {
  static const FlashVariant variants_32[] = {
      Variant<Tile<32, 8, 8, 64, 4, 2>>("rows128_keys64_threads128"),
  };
  static const FlashVariant variants_64[] = {
      Variant<Tile<64, 8, 8, 64, 4, 2>>("rows128_keys64_threads128"),
      Variant<Tile<64, 8, 8, 64, 8, 1>>("rows256_keys64_threads256"),
      Variant<Tile<64, 16, 8, 64, 12, 1>>("rows192_keys64_threads384"),
  };
  static const FlashVariant variants_128[] = {
      Variant<Tile<128, 16, 8, 64, 8, 1>>("rows128_keys64_threads256"),
      Variant<Tile<128, 16, 8, 64, 12, 1, 1>>("rows192_keys64_threads384"),
      Variant<Tile<128, 8, 8, 32, 8, 1>>("rows256_keys32_threads256"),
      Variant<Tile<128, 8, 4, 32, 4, 2>>("rows64_keys32_threads128"),
  };
  static const FlashVariant variants_256[] = {
      Variant<Tile<256, 16, 4, 64, 8, 1>>("rows64_keys64_threads256"),
      Variant<Tile<256, 8, 4, 16, 2, 2>>("rows32_keys16_threads64"),
  };
  if (dim_max <= 32) return variants_32;
  if (dim_max <= 64) return variants_64;
  if (dim_max <= 128) return variants_128;
  return variants_256;
}

}  // namespace attend::cuda
