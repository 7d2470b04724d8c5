// SPDX-License-Identifier: Apache-2.0
//
// Plain instances of cuda_flash_sm80 for bf16.

#include "kernels/cuda/sm80/instances.h"
#include "kernels/cuda/sm80/tables.cuh"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> PlainBFloat16(int dim, bool few_tiles, bool paged) {
  return PlainVariants<__nv_bfloat16>(dim, few_tiles, paged);
}

}  // namespace attend::cuda::sm80
