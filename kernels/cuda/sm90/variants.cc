// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/sm90/variants.h"

#include <algorithm>

#include "kernels/contract/limits.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

std::span<const FlashVariant> Sm90VariantsFor(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (p.has_bias && (p.page_rows > 0 || p.dropout > 0 || dim > kSm90BiasDimMax)) return {};
  if (p.has_bias && !p.bias_bits && !p.bias_as_q) return {};
  if (!(p.scale >= kLateScaleMin && p.scale <= kLateScaleMax)) return {};
  const bool general = p.has_alibi || p.o_float32;
  if (general && (p.has_bias || p.dropout > 0 || dim > kSm90GeneralDimMax)) return {};
  if (p.page_rows > 0 && dim > kSm90PagesDimMax) return {};
  if (p.dropout > 0 && dim > kSm90DropoutDimMax) return {};
  switch (p.dtype) {
    case DType::kFloat16:
      if (general) return Sm90GeneralVariantsF16(p);
      return p.bias_as_q ? Sm90BiasVariantsF16(p) : Sm90VariantsF16(p);
    case DType::kBFloat16:
      if (general) return Sm90GeneralVariantsBf16(p);
      return p.bias_as_q ? Sm90BiasVariantsBf16(p) : Sm90VariantsBf16(p);
    default:
      return {};
  }
}

cudaError_t LoadSm90() {
  Problem p;
  p.scale = 1.0f;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const int64_t dim_v : {dim, int64_t{128}}) {
        p.dtype = dtype;
        p.dim = dim;
        p.dim_v = dim_v;
        for (const int32_t dropout : {0, 1}) {
          p.dropout = dropout;
          const cudaError_t error = LoadVariants(Sm90VariantsFor(p));
          if (error != cudaSuccess) return error;
        }
        p.dropout = 0;
        for (const DType bias : {DType::kBit, dtype}) {
          SetBias(bias, &p);
          const cudaError_t error = LoadVariants(Sm90VariantsFor(p));
          if (error != cudaSuccess) return error;
        }
        p.has_bias = p.bias_bits = p.bias_as_q = false;
        p.has_alibi = true;
        const cudaError_t error = LoadVariants(Sm90VariantsFor(p));
        if (error != cudaSuccess) return error;
        p.has_alibi = false;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace attend::cuda
