// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_sm90 for bf16.

#include "kernels/cuda/sm90/table.cuh"
#include "kernels/cuda/sm90/variants.h"

namespace attend::cuda {

std::span<const FlashVariant> Sm90VariantsBf16(const Problem& problem) {
  return Sm90Variants<true>(problem);
}

}  // namespace attend::cuda
