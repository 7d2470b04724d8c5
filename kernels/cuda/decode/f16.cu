// SPDX-License-Identifier: Apache-2.0
//
// Instances of cuda_decode_sm80 for fp16.

#include "kernels/cuda/decode/instances.h"
#include "kernels/cuda/decode/table.cuh"

namespace attend::cuda::decode {

std::span<const FlashVariant> Float16(int dim, int rows) { return Table<__half>(dim, rows); }

}  // namespace attend::cuda::decode
