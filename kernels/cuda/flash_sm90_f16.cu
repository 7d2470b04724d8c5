// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_sm90 for fp16.

#include "kernels/cuda/flash_sm90.h"
#include "kernels/cuda/flash_sm90_table.cuh"

namespace attend::cuda {

std::span<const FlashVariant> Sm90VariantsF16(const Problem& problem) {
  return Sm90Variants<false>(problem);
}

}  // namespace attend::cuda
