// SPDX-License-Identifier: Apache-2.0
//
// The smallest faults that the check detects in answers of the GPU's kernels.

#include "tests/kernels/support/smallest_faults.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

JudgedKernel KernelOf(KernelId id) {
  const bool rounds = id != KernelId::kCudaFlashFp32;
  return {.unrounded = !rounds,
          .rounded = rounds,
          .run =
              [id](OwnedAttention* owned) {
                if (!CanRun(owned->attention, id)) return false;
                EXPECT_TRUE(RunOnDevice(owned, id).ok());
                return true;
              },
          .run_gradients =
              [id](OwnedAttention* owned, OwnedGradients* gradients) {
                if (!Takes({id}, owned->attention, gradients->get())) return false;
                EXPECT_TRUE(RunBackward(owned, gradients, {id}).ok());
                return true;
              }};
}

const JudgedKernel kKernels[] = {KernelOf(KernelId::kCudaFlashFp32),
                                 KernelOf(KernelId::kCudaFlashSm80),
                                 KernelOf(KernelId::kCudaFlashSm90)};

class CudaSmallestFaults : public ::testing::TestWithParam<size_t> {};

TEST_P(CudaSmallestFaults, MatchTheTable) { ExpectSmallestFault(GetParam(), kKernels); }

INSTANTIATE_TEST_SUITE_P(Faults, CudaSmallestFaults,
                         ::testing::Range(size_t{0}, CountSmallestFaults()),
                         [](const auto& info) { return "Fault" + std::to_string(info.param); });

TEST(CudaSmallestFaults, DISABLED_Measure) { PrintSmallestFaults(kKernels); }

}  // namespace
}  // namespace attend::test
