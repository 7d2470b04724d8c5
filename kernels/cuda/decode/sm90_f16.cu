// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_decode_sm90 for fp16.

#include "kernels/cuda/decode/instances.h"
#include "kernels/cuda/decode/sm90_table.cuh"

namespace attend::cuda::decode {

std::span<const FlashVariant> HopperFloat16(int dim, int rows) {
  return HopperTable<__half>(dim, rows);
}

}  // namespace attend::cuda::decode
