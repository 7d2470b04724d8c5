// SPDX-License-Identifier: Apache-2.0
//
// General instances of cuda_flash_sm90 for fp16: with ALiBi, and O in float32.

#include "kernels/cuda/sm90/table.cuh"
#include "kernels/cuda/sm90/variants.h"

namespace attend::cuda {

std::span<const FlashVariant> Sm90GeneralVariantsF16(const Problem& problem) {
  return Sm90GeneralVariants<false>(problem);
}

}  // namespace attend::cuda
