// SPDX-License-Identifier: Apache-2.0
//
// Copies tensors of 16-bit elements to where rows begin on 16-byte boundaries. Host code; any
// thread whose current device is the memory's.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/contract/problem.h"

namespace attend::cuda {

// The extents of a tensor [B, H, L, D].
struct TensorShape {
  int64_t batch = 0, heads = 0, rows = 0, columns = 0;
};

// One tensor, and its copy, which is dense but for its rows: these are RepackedColumns apart, and
// zeros fill them. The copy's base is on a 16-byte boundary, the tensor's on a 2-byte one.
struct RepackPiece {
  ConstTensorView tensor;
  TensorShape shape;
  const int64_t* lengths = nullptr;  // [batch] rows that are copied, on the device; null: all
  void* copy = nullptr;
};

inline constexpr int64_t kRepackAlignment = 8;  // elements
constexpr int64_t RepackedColumns(int64_t columns) {
  return (columns + kRepackAlignment - 1) / kRepackAlignment * kRepackAlignment;
}

// Enqueues the copies, one launch for several.
cudaError_t LaunchRepack(std::span<const RepackPiece> pieces, cudaStream_t stream);

// Has the code on the current device now, not at the first launch.
cudaError_t LoadRepack();

}  // namespace attend::cuda
