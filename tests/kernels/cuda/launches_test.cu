// SPDX-License-Identifier: Apache-2.0
//
// Launches that begin before the previous one has ended (hopper.cuh): after the wait they read what
// that launch wrote last.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/cuda/ptx/hopper.cuh"
#include "tests/kernels/support/cuda_hopper_model.cuh"
#include "tests/kernels/support/cuda_on_device.h"

// nvcc: a member of googletest's classes is never referenced.
#pragma nv_diag_suppress 177

namespace attend::cuda {
namespace {

class CudaLaunches : public HopperTest {};

constexpr int kBlocks = 8;
constexpr int kLaunches = 300;

// Lets the next launch begin, takes its time, and only then writes the data that the next one
// reads: block b adds 1 to the value that its neighbour wrote in the previous launch. Only thread 0
// waits; the others are released by a barrier, as in cuda_flash_sm90.
__global__ void AddToNeighbours(const uint32_t* before, uint32_t* after) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (threadIdx.x == 0) {
    AllowNextLaunch();
    AwaitEarlierLaunches();
  }
  __syncthreads();
  const uint32_t value = before[(blockIdx.x + 1) % kBlocks];
  for (uint32_t n = 0; n <= blockIdx.x; ++n) __nanosleep(500);
  __syncthreads();
  if (threadIdx.x == 1) after[blockIdx.x] = value + 1;
#endif
}

TEST_F(CudaLaunches, SeeTheResultsOfEarlierLaunches) {
  OnDevice<uint32_t> even(std::vector<uint32_t>(kBlocks, 0));
  OnDevice<uint32_t> odd(std::vector<uint32_t>(kBlocks, 0xdeadbeef));
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(32);
  config.attrs = &early;
  config.numAttrs = 1;
  for (int n = 0; n < kLaunches; ++n) {
    const uint32_t* before = n % 2 == 0 ? even.get() : odd.get();
    uint32_t* after = n % 2 == 0 ? odd.get() : even.get();
    ASSERT_EQ(cudaLaunchKernelEx(&config, AddToNeighbours, before, after), cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(even.Read(), std::vector<uint32_t>(kBlocks, kLaunches));
  EXPECT_EQ(odd.Read(), std::vector<uint32_t>(kBlocks, kLaunches - 1));
}

}  // namespace
}  // namespace attend::cuda
