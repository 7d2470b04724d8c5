// SPDX-License-Identifier: Apache-2.0
//
// The compiled variants of cuda_flash_sm90. Host code, any thread.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

inline constexpr int kSm90PagesDimMax = 192;    // D and Dv of keys in pages
inline constexpr int kSm90DropoutDimMax = 128;  // likewise of dropout
inline constexpr int kSm90BiasDimMax = 128;     // and with a bias or a mask of bits
inline constexpr int kSm90GeneralDimMax = 128;  // with ALiBi, or O in float32

// Whether tiles of 256 rows would leave multiprocessors idle: fewer than three quarters of an
// H200's 132.
inline bool Sm90HasFewTiles(const Problem& p) {
  constexpr int64_t kFewTiles = 99;
  const int64_t rows = p.packed ? p.total_q : p.batch * p.len_q;
  return rows * p.heads_q < kFewTiles * 256;
}

// See VariantsFor (launch.h): fp16 and bf16, a scale of 2^-20 to 2^20, pages up to
// kSm90PagesDimMax, dropout up to kSm90DropoutDimMax; of biases those of the problem's dtype and
// masks of bits, up to kSm90BiasDimMax and without pages and dropout; ALiBi and O in float32 up to
// kSm90GeneralDimMax, without a bias and dropout. Empty for others.
std::span<const FlashVariant> Sm90VariantsFor(const Problem& problem);

// The same for one dtype (f16.cu, bf16.cu), with a bias of it (bias_f16.cu, bias_bf16.cu), and of
// general kernels (general_f16.cu, general_bf16.cu).
std::span<const FlashVariant> Sm90VariantsF16(const Problem& problem);
std::span<const FlashVariant> Sm90VariantsBf16(const Problem& problem);
std::span<const FlashVariant> Sm90BiasVariantsF16(const Problem& problem);
std::span<const FlashVariant> Sm90BiasVariantsBf16(const Problem& problem);
std::span<const FlashVariant> Sm90GeneralVariantsF16(const Problem& problem);
std::span<const FlashVariant> Sm90GeneralVariantsBf16(const Problem& problem);

// Brings their code to the current device, which is a Hopper GPU.
cudaError_t LoadSm90();

}  // namespace attend::cuda
