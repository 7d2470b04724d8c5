// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_flash_sm80 with dropout for fp16.

#include "kernels/cuda/sm80/instances.h"
#include "kernels/cuda/sm80/tables.cuh"

namespace attend::cuda::sm80 {

std::span<const FlashVariant> DropoutFloat16(int dim) { return DropoutVariants<__half>(dim); }

}  // namespace attend::cuda::sm80
