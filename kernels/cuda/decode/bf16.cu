// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_decode_sm80 for bf16.

#include "kernels/cuda/decode/instances.h"
#include "kernels/cuda/decode/table.cuh"

namespace attend::cuda::decode {

std::span<const FlashVariant> BFloat16(int dim, int rows) {
  return Table<__nv_bfloat16>(dim, rows);
}

}  // namespace attend::cuda::decode
