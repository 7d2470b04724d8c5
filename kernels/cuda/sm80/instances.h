// SPDX-License-Identifier: Apache-2.0
//
// The instances of cuda_flash_sm80, one source per dtype and class, as variants.cc sees them.

#pragma once

#include <span>

#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda::sm80 {

// Variants for D and Dv up to `dim` (32, 64, 96, 128, 192 or 256), best first. `Plain` kernels
// compute any mask, but no score terms; `General` ones everything except dropout;
// `Dropout` ones everything, with dropout. `few_tiles`: the query rows fill no more tiles of 128
// than an H200 has multiprocessors. `paged`: K and V are paged.
std::span<const FlashVariant> PlainFloat16(int dim, bool few_tiles, bool paged);
std::span<const FlashVariant> PlainBFloat16(int dim, bool few_tiles, bool paged);
std::span<const FlashVariant> GeneralFloat16(int dim, bool paged);
std::span<const FlashVariant> GeneralBFloat16(int dim, bool paged);
std::span<const FlashVariant> DropoutFloat16(int dim);
std::span<const FlashVariant> DropoutBFloat16(int dim);

}  // namespace attend::cuda::sm80
