// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_fp32 that take any dtype, softcap, bias and ALiBi.

#include "kernels/cuda/fp32/kernel.cuh"
#include "kernels/cuda/fp32/variants.h"

namespace attend::cuda {
namespace {

template <class T>
FlashVariant Variant(std::string_view name) {
  return MakeVariant<T>(name, reinterpret_cast<const void*>(&FlashFp32Kernel<T, true>),
                        T::kSharedBytes);
}

}  // namespace

std::span<const FlashVariant> GeneralFlashVariants(int dim_max) {
  static const FlashVariant variants_32[] = {
      Variant<Tile<TileConfig{.head_dim = 32, .lane_cols = 8, .warps = 4, .blocks = 2}>>(
          "rows128_keys64_threads128"),
  };
  static const FlashVariant variants_64[] = {
      Variant<Tile<TileConfig{.head_dim = 64, .lane_cols = 16, .warps = 8}>>(
          "rows128_keys64_threads256"),
  };
  static const FlashVariant variants_128[] = {
      Variant<Tile<TileConfig{.head_dim = 128, .lane_cols = 16, .warps = 8}>>(
          "rows128_keys64_threads256"),
      Variant<Tile<TileConfig{
          .head_dim = 128, .lane_cols = 8, .warps = 4, .thread_rows = 4, .keys = 32, .blocks = 2}>>(
          "rows64_keys32_threads128"),
  };
  static const FlashVariant variants_256[] = {
      Variant<Tile<TileConfig{.head_dim = 256, .lane_cols = 16, .warps = 8, .thread_rows = 4}>>(
          "rows64_keys64_threads256"),
      Variant<Tile<TileConfig{
          .head_dim = 256, .lane_cols = 8, .warps = 2, .thread_rows = 4, .keys = 16, .blocks = 2}>>(
          "rows32_keys16_threads64"),
  };
  if (dim_max <= 32) return variants_32;
  if (dim_max <= 64) return variants_64;
  if (dim_max <= 128) return variants_128;
  return variants_256;
}

}  // namespace attend::cuda
