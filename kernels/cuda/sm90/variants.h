// SPDX-License-Identifier: Apache-2.0
//
// The compiled variants of cuda_flash_sm90. Host code, any thread.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

inline constexpr int kSm90PagesDimMax = 192;    // D and Dv with paged keys
inline constexpr int kSm90DropoutDimMax = 128;  // D and Dv with dropout
inline constexpr int kSm90BiasDimMax = 128;     // with a bias or a mask of bits
inline constexpr int kSm90GeneralDimMax = 128;  // with ALiBi, or O in float32

// Whether tiles of 256 rows would leave multiprocessors idle: fewer than three quarters of an
// H200's 132.
inline bool Sm90HasFewTiles(const Problem& p) {
  constexpr int64_t kFewTiles = 99;
  const int64_t rows = p.packed ? p.total_q : p.batch * p.len_q;
  return rows * p.heads_q < kFewTiles * 256;
}

// See VariantsFor (launch.h): fp16 and bf16, a scale of 2^-20 to 2^20, pages up to
// kSm90PagesDimMax, dropout up to kSm90DropoutDimMax; biases of the problem's dtype and masks of
// bits up to kSm90BiasDimMax, without pages and dropout; ALiBi and O in float32 up to
// kSm90GeneralDimMax, without a bias and dropout. Empty otherwise.
std::span<const FlashVariant> Sm90VariantsFor(const Problem& problem);

// The same per dtype (f16.cu, bf16.cu), with a bias of it (bias_f16.cu, bias_bf16.cu), and for
// general kernels (general_f16.cu, general_bf16.cu).
std::span<const FlashVariant> Sm90VariantsF16(const Problem& problem);
std::span<const FlashVariant> Sm90VariantsBf16(const Problem& problem);
std::span<const FlashVariant> Sm90BiasVariantsF16(const Problem& problem);
std::span<const FlashVariant> Sm90BiasVariantsBf16(const Problem& problem);
std::span<const FlashVariant> Sm90GeneralVariantsF16(const Problem& problem);
std::span<const FlashVariant> Sm90GeneralVariantsBf16(const Problem& problem);

// Loads their code on the current device, a Hopper GPU.
cudaError_t LoadSm90();

}  // namespace attend::cuda
