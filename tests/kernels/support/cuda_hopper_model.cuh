// SPDX-License-Identifier: Apache-2.0
//
// Shared by tests of hopper.cuh and wgmma.cuh: the device they run on, and the host's model of
// tensors and of a box in shared memory.

#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "tests/kernels/support/cuda_on_device.h"

namespace attend::cuda {

class HopperTest : public testing::Test {
 protected:
  void SetUp() override {
    int major = 0, minor = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    ASSERT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
    if (major != 9 || minor != 0) {
      GTEST_SKIP() << "compute capability " << major << "." << minor << ", not 9.0";
    }
  }
};

// Byte offset of element (row, col) in a box of 64 or 32 columns: row after row, with each row's
// 16-byte chunks permuted by the swizzle, which repeats after 8 rows.
__host__ __device__ inline int BoxOffset(int cols, int row, int col) {
  const int swizzle = cols == 64 ? row % 8 : row / 2 % 4;
  return 2 * cols * row + 16 * (col / 8 ^ swizzle) + 2 * (col % 8);
}

// Extra shared memory of a launch, so that boxes can begin on a 1024-byte boundary.
inline constexpr int kAlignmentBytes = 1024;

__device__ __forceinline__ char* AlignedShared() {
  extern __shared__ char unaligned[];
  return unaligned +
         (kAlignmentBytes - SharedAddress(unaligned) % kAlignmentBytes) % kAlignmentBytes;
}

// Sets all bits, which no other code writes. Called by all threads, which may write afterwards.
__device__ __forceinline__ void FillShared(char* shared, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(shared)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  FenceAsyncProxy();
  __syncthreads();
}

// Coordinates of a box's first element; any may be outside the tensor.
struct Place {
  int col, row, h, b;
};

inline std::string Name(const Place& place) {
  return "col " + std::to_string(place.col) + " row " + std::to_string(place.row) + " h " +
         std::to_string(place.h) + " b " + std::to_string(place.b);
}

// [batch, heads, rows, dim] of 16-bit elements, strides in elements. No element is 0, nor are gaps
// between rows: zeros come from the copy engine.
struct Tensor {
  int batch, heads, rows, dim;
  int64_t stride_b, stride_h, stride_l;

  bool Has(const Place& at) const {
    return at.b >= 0 && at.b < batch && at.h >= 0 && at.h < heads && at.row >= 0 && at.row < rows &&
           at.col >= 0 && at.col < dim;
  }
  int64_t Index(const Place& at) const {
    return at.b * stride_b + at.h * stride_h + at.row * stride_l + at.col;
  }
  std::vector<uint16_t> Elements() const {
    std::vector<uint16_t> elements(Index({dim - 1, rows - 1, heads - 1, batch - 1}) + 1);
    for (size_t n = 0; n < elements.size(); ++n) {
      elements[n] = static_cast<uint16_t>(1 + n % 0xffff);
    }
    return elements;
  }
  ConstTensorView View(const void* data) const { return {data, stride_b, stride_h, stride_l}; }
};

// The contents of shared memory after a box has been loaded.
inline std::vector<uint16_t> ExpectedBox(const Tensor& tensor, const TensorBox& box,
                                         const Place& at) {
  const std::vector<uint16_t> elements = tensor.Elements();
  std::vector<uint16_t> expected(box.rows * box.cols);
  for (int row = 0; row < box.rows; ++row) {
    for (int col = 0; col < box.cols; ++col) {
      const Place from = {at.col + col, at.row + row, at.h, at.b};
      expected[BoxOffset(box.cols, row, col) / 2] =
          tensor.Has(from) ? elements[tensor.Index(from)] : 0;
    }
  }
  return expected;
}

}  // namespace attend::cuda
