// SPDX-License-Identifier: Apache-2.0
//
// General instances of cuda_flash_fp32: any dtype, score terms and dropout.

#include "kernels/cuda/fp32/tables.cuh"
#include "kernels/cuda/fp32/variants.h"

namespace attend::cuda {

std::span<const FlashVariant> GeneralFlashVariants(int dim_max, bool paged) {
  using D64 = Tile<TileConfig{.head_dim = 64, .lane_cols = 16, .warps = 8}>;
  if (dim_max <= 32) return fp32::Variants<true, fp32::D32>(paged);
  if (dim_max <= 64) return fp32::Variants<true, D64, fp32::D128Small>(paged);
  if (dim_max <= 128) return fp32::Variants<true, fp32::D128, fp32::D128Small>(paged);
  return fp32::Variants<true, fp32::D256, fp32::D256Small>(paged);
}

}  // namespace attend::cuda
