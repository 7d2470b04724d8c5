// SPDX-License-Identifier: Apache-2.0
//
// The compiled variants of cuda_flash_sm80. Host code, any thread.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

// The variants that compute `problem` (fp16 or bf16), best first; at least one runs with 99 KiB of
// shared memory per block, which all GPUs since Ampere have. A function of the problem alone, never
// of strides or addresses. Empty for other dtypes.
std::span<const FlashVariant> Sm80VariantsFor(const Problem& problem);

// Loads all variants on the current device, so that no launch has to.
cudaError_t LoadSm80();

}  // namespace attend::cuda
