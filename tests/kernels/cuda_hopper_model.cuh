// SPDX-License-Identifier: Apache-2.0
//
// What the tests of hopper.cuh and wgmma.cuh share: where they run, and the host's model of a box
// in shared memory.

#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "kernels/cuda/hopper.cuh"
#include "tests/kernels/cuda_on_device.h"

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

// Where element (row, col) of a box of 64 or 32 columns lies, in bytes: row after row, the 16-byte
// chunks of each exchanged by the swizzle, which repeats after 8 rows.
__host__ __device__ inline int BoxOffset(int cols, int row, int col) {
  const int swizzle = cols == 64 ? row % 8 : row / 2 % 4;
  return 2 * cols * row + 16 * (col / 8 ^ swizzle) + 2 * (col % 8);
}

// What a launch asks for besides its boxes, so that they can begin on a 1024-byte boundary.
inline constexpr int kAlignmentBytes = 1024;

__device__ __forceinline__ char* AlignedShared() {
  extern __shared__ char unaligned[];
  return unaligned +
         (kAlignmentBytes - SharedAddress(unaligned) % kAlignmentBytes) % kAlignmentBytes;
}

// All bits set: what nothing else writes. By all threads, who can then write on.
__device__ __forceinline__ void FillShared(char* shared, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(shared)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  FenceAsyncProxy();
  __syncthreads();
}

}  // namespace attend::cuda
