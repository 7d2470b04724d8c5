// SPDX-License-Identifier: Apache-2.0
//
// The compiled variants of cuda_flash_fp32 and how one is chosen. Host code, any thread.

#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/problem.h"

namespace attend::cuda {

struct FlashVariant {
  std::string_view name;  // "rows128_keys64_threads256": the tile of one block
  int rows;
  int threads;
  int shared_bytes;
  const void* kernel;
};

// Variants for head dims up to `dim_max` (32, 64, 128 or 256), best first; at least
// one runs where a block may have 99 KiB of shared memory, as on all GPUs since Ampere. `plain`
// kernels compute fp32 without softcap, bias and ALiBi; `general` ones everything.
std::span<const FlashVariant> PlainFlashVariants(int dim_max);
std::span<const FlashVariant> GeneralFlashVariants(int dim_max);

// The variants that compute `problem`. Depends on the problem alone, never on strides or addresses:
// the same bits come out wherever a problem lies in memory.
std::span<const FlashVariant> FlashVariantsFor(const Problem& problem);

}  // namespace attend::cuda
