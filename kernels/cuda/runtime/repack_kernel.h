// SPDX-License-Identifier: Apache-2.0
//
// Copies tensors of 16-bit elements so that rows are 16-byte aligned. Host code; any thread whose
// current device is the memory's.

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

// One tensor and its copy, which is dense except that rows are RepackedColumns apart, padded with
// zeros. The copy's base is 16-byte aligned, the tensor's 2-byte aligned.
struct RepackPiece {
  ConstTensorView tensor;
  TensorShape shape;
  const int64_t* lengths = nullptr;  // [batch] rows to copy, in device memory; null: all
  void* copy = nullptr;
};

inline constexpr int64_t kRepackAlignment = 8;  // elements
constexpr int64_t RepackedColumns(int64_t columns) {
  return (columns + kRepackAlignment - 1) / kRepackAlignment * kRepackAlignment;
}

// Enqueues the copies, several per launch.
cudaError_t LaunchRepack(std::span<const RepackPiece> pieces, cudaStream_t stream);

// Loads the code on the current device now, instead of at the first launch.
cudaError_t LoadRepack();

}  // namespace attend::cuda
