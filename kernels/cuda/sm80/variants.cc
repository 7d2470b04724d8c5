// SPDX-License-Identifier: Apache-2.0
//
// Chooses variants of cuda_flash_sm80. Host code, any thread.

#include "kernels/cuda/sm80/variants.h"

#include <algorithm>
#include <cmath>

#include "kernels/contract/limits.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/sm80/instances.h"

namespace attend::cuda {
namespace {

constexpr int kDims[] = {32, 64, 96, 128, 192, 256};  // compiled head dims

// With at most this many tiles of 128 rows, multiprocessors may be idle: an H200 has 132.
constexpr int64_t kFewTiles = 132;

bool HasFewTiles(const Problem& p) {
  const int64_t rows = p.packed ? p.total_q : p.batch * p.len_q;
  return rows * p.heads_q <= kFewTiles * 128;
}

bool IsPlain(const Problem& p) {
  const float scale = std::abs(p.scale);
  return !HasScoreTerms(p) && scale >= kLateScaleMin && scale <= kLateScaleMax;
}

}  // namespace

std::span<const FlashVariant> Sm80VariantsFor(const Problem& p) {
  const int64_t most = std::max(p.dim, p.dim_v);
  const int dim = *std::lower_bound(std::begin(kDims), std::end(kDims) - 1, most);
  const bool paged = p.page_rows > 0;
  const bool dropout = p.dropout > 0;
  switch (p.dtype) {
    case DType::kFloat16:
      if (dropout) return sm80::DropoutFloat16(dim);
      return IsPlain(p) ? sm80::PlainFloat16(dim, HasFewTiles(p), paged)
                        : sm80::GeneralFloat16(dim, paged);
    case DType::kBFloat16:
      if (dropout) return sm80::DropoutBFloat16(dim);
      return IsPlain(p) ? sm80::PlainBFloat16(dim, HasFewTiles(p), paged)
                        : sm80::GeneralBFloat16(dim, paged);
    default:
      return {};
  }
}

cudaError_t LoadSm80() {
  for (const int dim : kDims) {
    for (const bool paged : {false, true}) {
      for (const auto& variants :
           {sm80::PlainFloat16(dim, false, paged), sm80::PlainBFloat16(dim, false, paged),
            sm80::GeneralFloat16(dim, paged), sm80::GeneralBFloat16(dim, paged),
            sm80::DropoutFloat16(dim), sm80::DropoutBFloat16(dim)}) {
        const cudaError_t error = LoadVariants(variants);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace attend::cuda
