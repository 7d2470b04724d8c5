// SPDX-License-Identifier: Apache-2.0
//
// The hand-over of registers between warpgroups (hopper.cuh): one gives away what it does not need,
// the others compute with more than the launch gave them.

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

class CudaRegisters : public HopperTest {};

// kTakers warpgroups beside the one that releases; kBlocks to a multiprocessor. Registers as in
// sm90/tile.cuh.
template <int kTakers_, int kBlocks_, int kReleased_>
struct Split {
  static constexpr int kTakers = kTakers_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kReleased = kReleased_;  // what a thread that releases keeps
  static constexpr int kThreads = 128 * (kTakers + 1);
  static constexpr int kLaunched = 65536 / (kThreads * kBlocks) / 8 * 8;
  static constexpr int kTaken = (kLaunched * (kTakers + 1) - kReleased) / kTakers / 8 * 8;
  // More than the launch gives, and room for addresses.
  static constexpr int kValues = kTaken - 24;
  static_assert(kTaken <= 256 && kValues > kLaunched);
};

constexpr int kRounds = 20;

__host__ __device__ constexpr uint32_t Seed(int block, int thread) {
  return block * 2654435761u + thread * 40503u + 1u;
}

// Where value n begins, and what becomes of it beside the next one: all of them live at once.
__host__ __device__ constexpr uint32_t Begin(uint32_t seed, int n) {
  return seed ^ static_cast<uint32_t>(n) * 2246822519u;
}
__host__ __device__ constexpr uint32_t Stir(uint32_t value, uint32_t next) {
  return value * 1664525u + next;
}
__host__ __device__ constexpr uint32_t Join(uint32_t joined, uint32_t value) {
  return joined * 31 + value;
}

template <int kCount>
uint32_t Expected(uint32_t seed) {
  uint32_t x[kCount];
  for (int n = 0; n < kCount; ++n) x[n] = Begin(seed, n);
  for (int round = 0; round < kRounds; ++round) {
    for (int n = 0; n < kCount; ++n) x[n] = Stir(x[n], x[(n + 1) % kCount]);
  }
  uint32_t joined = 0;
  for (int n = 0; n < kCount; ++n) joined = Join(joined, x[n]);
  return joined;
}

// The first warpgroup passes a seed to every thread of the others and releases its registers; the
// others take them and compute.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) TakeAndStir(uint32_t* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ uint32_t seeds[S::kThreads];
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ReleaseRegisters<S::kReleased>();
    for (int t = threadIdx.x; t < S::kThreads; t += 128) seeds[t] = Seed(blockIdx.x, t);
    ArriveNamed(1, S::kThreads);
  } else {
    TakeRegisters<S::kTaken>();
    SyncNamed(1, S::kThreads);
    const uint32_t seed = seeds[threadIdx.x];
    uint32_t x[S::kValues];
#pragma unroll
    for (int n = 0; n < S::kValues; ++n) x[n] = Begin(seed, n);
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int n = 0; n < S::kValues; ++n) x[n] = Stir(x[n], x[(n + 1) % S::kValues]);
    }
    uint32_t joined = 0;
#pragma unroll
    for (int n = 0; n < S::kValues; ++n) joined = Join(joined, x[n]);
    out[blockIdx.x * S::kThreads + threadIdx.x] = joined;
  }
#endif
}

// More blocks than fit the device at once: registers must be as they were when the next one begins.
template <class S>
void CheckSplit() {
  constexpr int kGrid = 1000;
  OnDevice<uint32_t> out(std::vector<uint32_t>(kGrid * S::kThreads));
  TakeAndStir<S><<<kGrid, S::kThreads>>>(out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint32_t> got = out.Read();
  for (int block = 0; block < kGrid; block += 37) {
    for (int t = 128; t < S::kThreads; ++t) {
      ASSERT_EQ(got[block * S::kThreads + t], Expected<S::kValues>(Seed(block, t)))
          << S::kTaken << " registers, block " << block << " thread " << t;
    }
  }
}

TEST_F(CudaRegisters, OneGroupsRegistersGoToOne) { CheckSplit<Split<1, 2, 40>>(); }
TEST_F(CudaRegisters, OneGroupsRegistersGoToTwo) { CheckSplit<Split<2, 1, 40>>(); }
TEST_F(CudaRegisters, OneGroupsRegistersGoToThree) { CheckSplit<Split<3, 1, 32>>(); }

}  // namespace
}  // namespace attend::cuda
