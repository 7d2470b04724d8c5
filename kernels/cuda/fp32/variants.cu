// SPDX-License-Identifier: Apache-2.0
//
// Chooses variants of cuda_flash_fp32: the plain ones where they apply, for the smallest compiled
// head dim.

#include "kernels/cuda/fp32/variants.h"

#include <algorithm>
#include <cmath>

#include "kernels/contract/limits.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {
namespace {

bool IsPlain(const Problem& p) {
  const float scale = std::abs(p.scale);
  return p.dtype == DType::kFloat32 && !HasScoreTerms(p) && p.dropout == 0 &&
         scale >= kLateScaleMin && scale <= kLateScaleMax;
}

}  // namespace

std::span<const FlashVariant> Fp32VariantsFor(const Problem& p) {
  const int dim_max = static_cast<int>(std::max(p.dim, p.dim_v));
  const bool paged = p.page_rows > 0;
  return IsPlain(p) ? PlainFlashVariants(dim_max, paged) : GeneralFlashVariants(dim_max, paged);
}

cudaError_t LoadFp32() {
  for (const int dim_max : {32, 64, 128, 256}) {
    for (const auto& variants :
         {PlainFlashVariants(dim_max, false), GeneralFlashVariants(dim_max, false),
          PlainFlashVariants(dim_max, true), GeneralFlashVariants(dim_max, true)}) {
      const cudaError_t error = LoadVariants(variants);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace attend::cuda
