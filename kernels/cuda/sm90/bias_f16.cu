// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_sm90 for fp16 with an fp16 bias.

#include "kernels/cuda/sm90/table.cuh"
#include "kernels/cuda/sm90/variants.h"

namespace attend::cuda {

std::span<const FlashVariant> Sm90BiasVariantsF16(const Problem& problem) {
  return Sm90BiasVariants<false>(problem);
}

}  // namespace attend::cuda
