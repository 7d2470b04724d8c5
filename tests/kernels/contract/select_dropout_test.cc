// SPDX-License-Identifier: Apache-2.0
//
// The kernels that Select chooses for problems with dropout, and the reasons against others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

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

TEST(SelectDropout, FlashKernelsSupportDropout) {
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

Problem Dropped(int64_t dim) {
  Problem p = test::MakeSpec(2, 4, 2, 16, 32, dim, dim, DType::kFloat16).problem;
  p.dropout = 6554;
  p.key_offset = 32;
  return p;
}

DeviceInfo RoomyGpu(int compute_capability) {
  DeviceInfo device = Gpu(compute_capability);
  device.workspace_bytes_max = 1 << 30;
  return device;
}

KernelId AutoBackward(const Problem& problem, int compute_capability) {
  const Result<Selection> selection = SelectBackward(problem, RoomyGpu(compute_capability));
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  return selection->kernel;
}

TEST(SelectDropout, FlashKernelsSupportDropoutBackward) {
  for (const int64_t dim : {64, 128}) {
    EXPECT_EQ(AutoBackward(Dropped(dim), 90), KernelId::kCudaFlashSm90) << dim;
    EXPECT_TRUE(SelectBackward(Dropped(dim), RoomyGpu(90), "cuda_flash_sm80").ok());
    EXPECT_EQ(AutoBackward(Dropped(dim), 80), KernelId::kCudaFlashSm80) << dim;
    EXPECT_EQ(AutoBackward(Dropped(dim), 75), KernelId::kCudaFlashFp32) << dim;
  }
  Problem narrow = Dropped(64);
  narrow.dtype = DType::kFloat32;
  EXPECT_EQ(AutoBackward(narrow, 90), KernelId::kCudaFlashFp32);
}

TEST(SelectDropout, BackwardOfLongHeadsUsesMmaSync) {
  for (const auto& [dim, dim_v] : {std::pair{136, 128}, {128, 136}, {256, 256}}) {
    Problem p = Dropped(dim);
    p.dim_v = dim_v;
    const Result<Selection> chosen = SelectBackward(p, RoomyGpu(90));
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80) << dim << " " << dim_v;
    EXPECT_THAT(std::string(chosen->why), HasSubstr("dropout up to a D and Dv of 128"));
    const Status refused = SelectBackward(p, RoomyGpu(90), "cuda_flash_sm90").status();
    EXPECT_EQ(refused.code(), Code::kUnimplemented);
    EXPECT_THAT(refused.message(), HasSubstr("dropout up to a D and Dv of 128"));
    p.dropout = 0;
    EXPECT_EQ(AutoBackward(p, 90), KernelId::kCudaFlashSm90) << "without it";
  }
}

TEST(SelectDropout, BackwardOfUnalignedKeyOffsetsUsesCudaCores) {
  Problem p = Dropped(64);
  p.key_offset = 40;
  EXPECT_EQ(AutoBackward(p, 90), KernelId::kCudaFlashFp32);
  for (const std::string_view forced : {"cuda_flash_sm80", "cuda_flash_sm90"}) {
    const Status refused = SelectBackward(p, RoomyGpu(90), forced).status();
    EXPECT_EQ(refused.code(), Code::kUnimplemented) << forced;
    EXPECT_THAT(refused.message(), HasSubstr("multiple of 16")) << forced;
  }
  p.dropout = 0;
  EXPECT_EQ(AutoBackward(p, 90), KernelId::kCudaFlashSm90);
}

TEST(SelectDropout, KeysInPagesUseCudaCores) {
  Problem p = Dropped(64);
  p.page_rows = 16;
  EXPECT_TRUE(Check(p).ok());
  for (const int compute_capability : {75, 80, 90}) {
    EXPECT_EQ(Auto(p, Gpu(compute_capability)), KernelId::kCudaFlashFp32);
  }
  for (const std::string_view forced : {"cuda_flash_sm80", "cuda_flash_sm90"}) {
    const Status refused = Select(p, Gpu(90), forced).status();
    EXPECT_EQ(refused.code(), Code::kUnimplemented) << forced;
    EXPECT_THAT(refused.message(), HasSubstr("no dropout with keys in pages")) << forced;
  }
  DeviceInfo cpu;
  cpu.name = "cpu";
  EXPECT_EQ(Auto(p, cpu), KernelId::kCpuFlash);
  p.page_rows = 0;
  EXPECT_EQ(Auto(p, Gpu(90)), KernelId::kCudaFlashSm90);
}

TEST(SelectDropout, NoKernelDecodesWithDropout) {
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
