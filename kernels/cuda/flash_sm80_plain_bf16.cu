// SPDX-License-Identifier: Apache-2.0
//
// The plain instances of cuda_flash_sm80 for bf16.

#include "kernels/cuda/flash_sm80_tables.cuh"
#include "kernels/cuda/flash_sm80_variants.h"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> PlainBFloat16(int dim, bool few_tiles) {
  return PlainVariants<__nv_bfloat16>(dim, few_tiles);
}

}  // namespace attend::cuda::sm80
