// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_sm90 for bf16 with a bf16 bias.

#include "kernels/cuda/sm90/table.cuh"
#include "kernels/cuda/sm90/variants.h"

namespace attend::cuda {

std::span<const FlashVariant> Sm90BiasVariantsBf16(const Problem& problem) {
  return Sm90BiasVariants<true>(problem);
}

}  // namespace attend::cuda
