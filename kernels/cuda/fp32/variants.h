// SPDX-License-Identifier: Apache-2.0
//
// The compiled variants of cuda_flash_fp32 and how one is chosen. Host code, any thread.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

// Variants for head dims up to `dim_max` (32, 64, 128 or 256), best first; at least one runs with
// 99 KiB of shared memory per block, which all GPUs since Ampere have. `Plain` kernels compute fp32
// without score terms and dropout; `General` ones everything.
std::span<const FlashVariant> PlainFlashVariants(int dim_max, bool paged);
std::span<const FlashVariant> GeneralFlashVariants(int dim_max, bool paged);

// See VariantsFor (launch.h).
std::span<const FlashVariant> Fp32VariantsFor(const Problem& problem);

// Loads their code on the current device.
cudaError_t LoadFp32();

}  // namespace attend::cuda
