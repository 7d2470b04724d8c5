// SPDX-License-Identifier: Apache-2.0
//
// General instances of cuda_flash_sm80 for fp16.

#include "kernels/cuda/sm80/instances.h"
#include "kernels/cuda/sm80/tables.cuh"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> GeneralFloat16(int dim, bool paged) {
  return GeneralVariants<__half>(dim, paged);
}

}  // namespace attend::cuda::sm80
