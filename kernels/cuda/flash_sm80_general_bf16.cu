// SPDX-License-Identifier: Apache-2.0
//
// The general instances of cuda_flash_sm80 for bf16.

#include "kernels/cuda/flash_sm80_tables.cuh"
#include "kernels/cuda/flash_sm80_variants.h"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> GeneralBFloat16(int dim) {
  return GeneralVariants<__nv_bfloat16>(dim);
}

}  // namespace attend::cuda::sm80
