// SPDX-License-Identifier: Apache-2.0
//
// Shared by tests of the decoding kernels, which run with each kernel that the GPU has.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/support/cuda_run.h"

namespace attend::test {

inline constexpr double kCheckWork = 2e7;

inline int64_t Pick(std::mt19937_64* random, const std::vector<int64_t>& of) {
  return of[(*random)() % of.size()];
}

class DecodeKernelTest : public testing::TestWithParam<KernelId> {
 protected:
  void SetUp() override {
    OwnedAttention one =
        MakeAttention(MakeSpec(1, 8, 1, 1, 64, 64, 64, DType::kFloat16), FreshSeed());
    if (!CanRun(one.attention, kernel_)) GTEST_SKIP() << "not on this GPU";
  }

  const KernelId kernel_ = GetParam();
};

inline auto DecodeKernels() {
  return testing::Values(KernelId::kCudaDecodeSm80, KernelId::kCudaDecodeSm90);
}
inline std::string NameOfKernel(const testing::TestParamInfo<KernelId>& kernel) {
  return std::string(KernelName(kernel.param));
}

}  // namespace attend::test
