// SPDX-License-Identifier: Apache-2.0
//
// When the CPU's tile unit is chosen, and what is said where it is not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "kernels/contract/select.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

DeviceInfo Cpu(std::string_view not_amx) {
  DeviceInfo device;
  device.name = "cpu";
  device.not_amx = not_amx;
  return device;
}

Problem Rows(int64_t rows, DType dtype = DType::kBFloat16) {
  return test::MakeSpec(1, 4, 2, rows, 512, 64, 64, dtype).problem;
}

TEST(SelectAmx, TakesBf16WithMoreThanFourRowsOfAKvHead) {
  const DeviceInfo cpu = Cpu({});
  EXPECT_EQ(Select(Rows(3), cpu)->kernel, KernelId::kCpuFlashAmx);
  EXPECT_EQ(Select(Rows(2), cpu)->kernel, KernelId::kCpuFlash) << "4 rows of a KV head";
  EXPECT_THAT(std::string(Select(Rows(2), cpu)->why), HasSubstr("few query rows"));
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    EXPECT_EQ(Select(Rows(512, dtype), cpu)->kernel, KernelId::kCpuFlash);
  }
  Problem everything = Rows(512);
  everything.softcap = 30;
  everything.has_alibi = everything.has_sinks = everything.o_float32 = true;
  everything.dropout = 6554;
  everything.page_rows = 16;
  everything.mask.right = 0;
  SetBias(DType::kFloat32, &everything);
  EXPECT_EQ(Select(everything, cpu)->kernel, KernelId::kCpuFlashAmx);
}

TEST(SelectAmx, TakesTheBackwardPassOfTheSameProblemsWithAnOInBf16) {
  const DeviceInfo cpu = Cpu({});
  EXPECT_EQ(SelectBackward(Rows(13), cpu)->kernel, KernelId::kCpuFlashAmx);
  EXPECT_EQ(SelectBackward(Rows(12), cpu)->kernel, KernelId::kCpuFlash);
  EXPECT_EQ(SelectBackward(Rows(512, DType::kFloat16), cpu)->kernel, KernelId::kCpuFlash);
  EXPECT_EQ(SelectBackward(Rows(512), Cpu("refused"))->kernel, KernelId::kCpuFlash);
  EXPECT_EQ(SelectBackward(Rows(1), cpu, "cpu_flash_amx")->kernel, KernelId::kCpuFlashAmx);
  Problem wide = Rows(512);
  wide.o_float32 = true;
  EXPECT_EQ(SelectBackward(wide, cpu)->kernel, KernelId::kCpuFlash);
  EXPECT_EQ(SelectBackward(wide, cpu)->fallback, Fallback::kFloat32Output);
  EXPECT_THAT(SelectBackward(wide, cpu, "cpu_flash_amx").status().message(),
              HasSubstr("takes O in bf16"));
}

TEST(SelectAmx, LargeScalesUseCpuFlash) {
  for (const float scale : {0x1p20f, -0x1p20f, 0x1.1p20f, -0x1p100f}) {
    Problem p = Rows(512);
    p.scale = scale;
    const bool fits = scale == 0x1p20f || scale == -0x1p20f;
    const Result<Selection> chosen = Select(p, Cpu({}));
    EXPECT_EQ(chosen->kernel, fits ? KernelId::kCpuFlashAmx : KernelId::kCpuFlash) << scale;
    EXPECT_EQ(chosen->fallback, fits ? Fallback::kNone : Fallback::kScale);
  }
}

TEST(SelectAmx, WithoutATileUnitTheReasonIsGiven) {
  const Result<Selection> chosen = Select(Rows(512), Cpu("the system refused it"));
  EXPECT_EQ(chosen->kernel, KernelId::kCpuFlash);
  EXPECT_EQ(chosen->why, "the system refused it");
  EXPECT_EQ(Select(Rows(512), DeviceInfo{})->kernel, KernelId::kCpuFlash);
}

TEST(SelectAmx, ByNameIsRefusedWhereItCannotRun) {
  const auto refusal = [](const Problem& p, std::string_view not_amx) {
    const Status status = Select(p, Cpu(not_amx), "cpu_flash_amx").status();
    EXPECT_EQ(status.code(), Code::kUnimplemented);
    EXPECT_THAT(status.message(), HasSubstr("kernel cpu_flash_amx cannot compute this on cpu: "));
    return status.message();
  };
  EXPECT_THAT(refusal(Rows(512), "the system refused it"), HasSubstr("the system refused it"));
  EXPECT_THAT(refusal(Rows(512, DType::kFloat16), {}), HasSubstr("AMX tiles take bf16"));
  EXPECT_EQ(Select(Rows(1), Cpu({}), "cpu_flash_amx")->kernel, KernelId::kCpuFlashAmx);
  EXPECT_EQ(SelectBackward(Rows(512), Cpu("refused"), "cpu_flash_amx").status().code(),
            Code::kUnimplemented);
}

}  // namespace
}  // namespace attend
