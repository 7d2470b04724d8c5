// SPDX-License-Identifier: Apache-2.0
//
// The general instances of cuda_flash_sm80 for fp16.

#include "kernels/cuda/flash_sm80_tables.cuh"
#include "kernels/cuda/flash_sm80_variants.h"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> GeneralFloat16(int dim) { return GeneralVariants<__half>(dim); }

}  // namespace attend::cuda::sm80
