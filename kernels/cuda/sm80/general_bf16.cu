// SPDX-License-Identifier: Apache-2.0
//
// General instances of cuda_flash_sm80 for bf16.

#include "kernels/cuda/sm80/instances.h"
#include "kernels/cuda/sm80/tables.cuh"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> GeneralBFloat16(int dim, bool paged) {
  return GeneralVariants<__nv_bfloat16>(dim, paged);
}

}  // namespace attend::cuda::sm80
