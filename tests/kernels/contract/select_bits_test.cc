// SPDX-License-Identifier: Apache-2.0
//
// The kernels that Select chooses for problems with a mask of bits or a 16-bit bias, and the
// reasons against others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/contract/select.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

DeviceInfo Gpu(int compute_capability) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "cuda:0";
  device.compute_capability = compute_capability;
  return device;
}

Problem Masked() {
  Problem p = test::MakeSpec(2, 4, 2, 128, 256, 128, 128, DType::kFloat16).problem;
  p.has_bias = p.bias_bits = true;
  return p;
}

TEST(SelectBits, HoppersKernelSupportsThemForward) {
  const Result<Selection> hopper = Select(Masked(), Gpu(90));
  ASSERT_TRUE(hopper.ok());
  EXPECT_EQ(hopper->kernel, KernelId::kCudaFlashSm90);
  EXPECT_EQ(Select(Masked(), Gpu(80))->kernel, KernelId::kCudaFlashSm80);
  EXPECT_THAT(SelectBackward(Masked(), Gpu(90), "cuda_flash_sm90").status().message(),
              HasSubstr("bias"));
}

TEST(SelectBits, OtherProblemsFallBackToAmperesKernel) {
  for (void (*change)(Problem*) :
       {+[](Problem* p) { p->bias_bits = false; }, +[](Problem* p) { p->dim_v = 136; },
        +[](Problem* p) { p->dropout = 655; }}) {
    Problem other = Masked();
    change(&other);
    const Result<Selection> chosen = Select(other, Gpu(90));
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80) << Describe(other);
    EXPECT_THAT(std::string(chosen->why), HasSubstr("bias"));
  }
  Problem paged = Masked();
  paged.page_rows = 16;
  EXPECT_EQ(Select(paged, Gpu(90))->kernel, KernelId::kCudaFlashSm80);
  EXPECT_THAT(Select(paged, Gpu(90), "cuda_flash_sm90").status().message(), HasSubstr("pages"));
}

Problem Biased(DType bias) {
  Problem p = test::MakeSpec(2, 4, 2, 128, 256, 128, 128, DType::kFloat16).problem;
  SetBias(bias, &p);
  return p;
}

TEST(SelectBias, HoppersKernelSupportsQsDTypeForward) {
  const Result<Selection> hopper = Select(Biased(DType::kFloat16), Gpu(90));
  ASSERT_TRUE(hopper.ok());
  EXPECT_EQ(hopper->kernel, KernelId::kCudaFlashSm90);
  EXPECT_EQ(Select(Biased(DType::kFloat16), Gpu(80))->kernel, KernelId::kCudaFlashSm80);
  EXPECT_THAT(
      SelectBackward(Biased(DType::kFloat16), Gpu(90), "cuda_flash_sm90").status().message(),
      HasSubstr("bias"));
}

TEST(SelectBias, OtherProblemsFallBackToAmperesKernel) {
  for (const DType other : {DType::kBFloat16, DType::kFloat32}) {
    const Result<Selection> chosen = Select(Biased(other), Gpu(90));
    EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80);
    EXPECT_THAT(std::string(chosen->why), HasSubstr("q's dtype"));
  }
  for (void (*change)(Problem*) :
       {+[](Problem* p) { p->dim_v = 136; }, +[](Problem* p) { p->dropout = 655; },
        +[](Problem* p) { p->len_k = 255; }}) {
    Problem p = Biased(DType::kFloat16);
    change(&p);
    const Result<Selection> chosen = Select(p, Gpu(90));
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80) << Describe(p);
    EXPECT_THAT(std::string(chosen->why), HasSubstr("bias"));
  }
}

}  // namespace
}  // namespace attend
