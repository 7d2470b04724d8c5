// SPDX-License-Identifier: Apache-2.0
//
// Plain instances of cuda_flash_fp32: fp32 data without score terms and dropout. The hot ones.

#include "kernels/cuda/fp32/tables.cuh"
#include "kernels/cuda/fp32/variants.h"

namespace attend::cuda {

std::span<const FlashVariant> PlainFlashVariants(int dim_max, bool paged) {
  using D64 = Tile<TileConfig{.head_dim = 64, .lane_cols = 8, .warps = 4, .blocks = 2}>;
  using D64Rows256 = Tile<TileConfig{.head_dim = 64, .lane_cols = 8, .warps = 8}>;
  using D64Rows192 = Tile<TileConfig{.head_dim = 64, .lane_cols = 16, .warps = 12}>;
  using D128Rows192 = Tile<TileConfig{.head_dim = 128, .lane_cols = 16, .warps = 12, .unroll = 1}>;
  using D128Rows256 = Tile<TileConfig{.head_dim = 128, .lane_cols = 8, .warps = 8, .keys = 32}>;
  if (dim_max <= 32) return fp32::Variants<false, fp32::D32>(paged);
  if (dim_max <= 64) {
    return fp32::Variants<false, D64, D64Rows256, D64Rows192, fp32::D128Small>(paged);
  }
  if (dim_max <= 128) {
    return fp32::Variants<false, fp32::D128, D128Rows192, D128Rows256, fp32::D128Small>(paged);
  }
  return fp32::Variants<false, fp32::D256, fp32::D256Small>(paged);
}

}  // namespace attend::cuda
