// SPDX-License-Identifier: Apache-2.0
//
// Which kernels Select gives problems with dropout, and why not others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "kernels/contract/select.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

DeviceInfo Gpu(int compute_capability) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "cuda:3";
  device.compute_capability = compute_capability;
  return device;
}

KernelId Auto(const Problem& problem, const DeviceInfo& device) {
  const Result<Selection> selection = Select(problem, device);
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  return selection->kernel;
}

TEST(SelectDropout, IsTheFlashKernels) {
  Problem p = test::MakeSpec(2, 4, 2, 16, 32, 64, 64, DType::kFloat16).problem;
  p.dropout = 6554;
  EXPECT_EQ(Auto(p, Gpu(75)), KernelId::kCudaFlashFp32);
  EXPECT_EQ(Auto(p, Gpu(80)), KernelId::kCudaFlashSm80);
  EXPECT_EQ(Auto(p, Gpu(90)), KernelId::kCudaFlashSm90);
  p.dim = p.dim_v = 128;
  EXPECT_EQ(Auto(p, Gpu(90)), KernelId::kCudaFlashSm90);
  p.dim = 136;
  EXPECT_EQ(Auto(p, Gpu(90)), KernelId::kCudaFlashSm80);
  EXPECT_THAT(std::string(Select(p, Gpu(90))->why), HasSubstr("dropout up to a D and Dv of 128"));
  EXPECT_THAT(Select(p, Gpu(90), "cuda_flash_sm90").status().message(), HasSubstr("of 128"));
  p.dim = 64;
  p.key_offset = 48;
  EXPECT_EQ(Auto(p, Gpu(90)), KernelId::kCudaFlashSm90);
  p.key_offset = 40;
  EXPECT_EQ(Auto(p, Gpu(90)), KernelId::kCudaFlashFp32) << "draws are made for 16 keys at once";
  for (const std::string_view forced : {"cuda_flash_sm80", "cuda_flash_sm90"}) {
    EXPECT_THAT(Select(p, Gpu(90), forced).status().message(), HasSubstr("multiple of 16"));
  }
}

TEST(SelectDropout, BackwardIsMmaSyncs) {
  Problem p = test::MakeSpec(2, 4, 2, 16, 32, 64, 64, DType::kFloat16).problem;
  p.dropout = 6554;
  p.key_offset = 32;
  DeviceInfo gpu = Gpu(90);
  gpu.workspace_bytes_max = 1 << 30;
  const Result<Selection> chosen = SelectBackward(p, gpu);
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80);
  EXPECT_THAT(std::string(chosen->why), HasSubstr("cuda_flash_sm90 has no dropout"));
  p.key_offset = 40;
  EXPECT_EQ(SelectBackward(p, gpu)->kernel, KernelId::kCudaFlashFp32);
  EXPECT_THAT(SelectBackward(p, gpu, "cuda_flash_sm80").status().message(),
              HasSubstr("multiple of 16"));
}

TEST(SelectDropout, NoKernelDecodes) {
  Problem decoding = test::MakeSpec(2, 16, 2, 1, 4096, 128, 128, DType::kFloat16).problem;
  EXPECT_EQ(Auto(decoding, Gpu(90)), KernelId::kCudaDecodeSm80);
  decoding.dropout = 1;
  EXPECT_EQ(Auto(decoding, Gpu(90)), KernelId::kCudaFlashSm90);
  for (const std::string_view forced : {"cuda_decode_sm80", "cuda_decode_sm90"}) {
    const Status refused = Select(decoding, Gpu(90), forced).status();
    EXPECT_EQ(refused.code(), Code::kUnimplemented);
    EXPECT_THAT(refused.message(), HasSubstr("decoding kernels have no dropout"));
  }
}

}  // namespace
}  // namespace attend
