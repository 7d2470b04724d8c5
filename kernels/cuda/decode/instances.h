// SPDX-License-Identifier: Apache-2.0
//
// The instances of cuda_decode_sm80 and cuda_decode_sm90, one source per dtype, as launch.cc sees
// them.

#pragma once

#include <span>

#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda::decode {

// Variants for D and Dv up to `dim` (64, 128 or 256) and units of `rows` packed rows, best first.
std::span<const FlashVariant> Float16(int dim, int rows);
std::span<const FlashVariant> BFloat16(int dim, int rows);

// The same for cuda_decode_sm90.
std::span<const FlashVariant> HopperFloat16(int dim, int rows);
std::span<const FlashVariant> HopperBFloat16(int dim, int rows);

}  // namespace attend::cuda::decode
