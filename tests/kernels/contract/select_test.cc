// SPDX-License-Identifier: Apache-2.0
//
// Every outcome of Select, with its reason.

#include "kernels/contract/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kernels/contract/limits.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

DeviceInfo Cpu() {
  DeviceInfo device;
  device.name = "cpu";
  return device;
}

DeviceInfo Gpu(int64_t workspace_bytes_max) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "cuda:3";
  device.compute_capability = 90;
  device.workspace_bytes_max = workspace_bytes_max;
  return device;
}

Problem Small() { return test::MakeSpec(2, 4, 2, 16, 32, 64, 64).problem; }

TEST(Kernels, TableIsInLadderOrderWithUniqueNames) {
  std::set<std::string_view> names;
  ASSERT_EQ(Kernels().size(), static_cast<size_t>(kKernelCount));
  for (int n = 0; n < kKernelCount; ++n) {
    const KernelInfo& kernel = Kernels()[static_cast<size_t>(n)];
    EXPECT_EQ(static_cast<int>(kernel.id), n);
    EXPECT_EQ(KernelName(kernel.id), kernel.name);
    EXPECT_FALSE(kernel.summary.empty());
    names.insert(kernel.name);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kKernelCount));
}

TEST(Select, AutoTakesTheBestKernelOfTheDevice) {
  for (const std::string_view forced : {"", "auto"}) {
    const Result<Selection> cpu = Select(Small(), Cpu(), forced);
    ASSERT_TRUE(cpu.ok());
    EXPECT_EQ(cpu->kernel, KernelId::kCpuFlash);
    EXPECT_FALSE(cpu->why.empty());
    EXPECT_EQ(cpu->workspace_bytes, 0);
    const Result<Selection> gpu = Select(Small(), Gpu(0), forced);
    ASSERT_TRUE(gpu.ok());
    EXPECT_EQ(KernelName(gpu->kernel).substr(0, 5), "cuda_");
  }
}

TEST(Select, EveryKernelCanBeForcedOnlyOnItsDevice) {
  for (const KernelInfo& kernel : Kernels()) {
    DeviceInfo own = kernel.device == DeviceKind::kCpu ? Cpu() : Gpu(1 << 30);
    own.not_amx = {};
    const DeviceInfo other = kernel.device == DeviceKind::kCpu ? Gpu(1 << 30) : Cpu();
    Problem problem = Small();
    if (RoundsWeights(kernel.id)) problem.dtype = DType::kBFloat16;
    const Result<Selection> good = Select(problem, own, kernel.name);
    ASSERT_TRUE(good.ok()) << kernel.name << ": " << good.status().message();
    EXPECT_EQ(good->kernel, kernel.id);
    EXPECT_EQ(good->why, "asked for by name");
    const Result<Selection> bad = Select(Small(), other, kernel.name);
    ASSERT_FALSE(bad.ok());
    EXPECT_EQ(bad.status().code(), Code::kUnimplemented);
    EXPECT_THAT(bad.status().message(), HasSubstr(std::string(kernel.name)));
    EXPECT_THAT(bad.status().message(), HasSubstr(other.name));
  }
}

TEST(Select, UnknownNameIsAnInvalidArgumentThatListsTheDevicesKernels) {
  for (const DeviceInfo& device : {Cpu(), Gpu(1 << 30)}) {
    for (const auto& name : {std::string("cpu_flashy"), std::string(" "), std::string(1000, 'x')}) {
      const Result<Selection> result = Select(Small(), device, name);
      EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
      const std::string& text = result.status().message();
      for (const KernelInfo& kernel : Kernels()) {
        const bool listed = text.find(", " + std::string(kernel.name)) != std::string::npos;
        EXPECT_TRUE(text.size() < 500 && listed == (kernel.device == device.kind)) << text;
      }
    }
  }
}

TEST(Select, NaiveNeedsItsScoreMatrixToFit) {
  const Problem p = Small();
  const int64_t bytes = 4 * p.batch * p.heads_q * p.len_q * p.len_k;
  const Result<Selection> fits = Select(p, Gpu(bytes), "cuda_naive");
  ASSERT_TRUE(fits.ok());
  EXPECT_EQ(fits->workspace_bytes, bytes);
  const Result<Selection> not_quite = Select(p, Gpu(bytes - 1), "cuda_naive");
  ASSERT_FALSE(not_quite.ok());
  EXPECT_EQ(not_quite.status().code(), Code::kUnimplemented);
  EXPECT_THAT(not_quite.status().message(), HasSubstr(std::to_string(bytes)));
  EXPECT_THAT(not_quite.status().message(), HasSubstr(std::to_string(bytes - 1)));

  Problem huge = p;
  huge.batch = kBatchMax;
  huge.heads_q = huge.heads_kv = kHeadsMax;
  huge.len_q = huge.len_k = kLengthMax;
  const Result<Selection> overflow = Select(huge, Gpu(INT64_MAX), "cuda_naive");
  ASSERT_FALSE(overflow.ok());
  EXPECT_EQ(overflow.status().code(), Code::kUnimplemented);
}

Problem Half() {
  Problem p = Small();
  p.dtype = DType::kFloat16;
  return p;
}

DeviceInfo GpuOf(int compute_capability) {
  DeviceInfo device = Gpu(0);
  device.compute_capability = compute_capability;
  return device;
}

KernelId Auto(const Problem& problem, const DeviceInfo& device) {
  const Result<Selection> selection = Select(problem, device);
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  EXPECT_FALSE(selection->why.empty());
  return selection->kernel;
}

TEST(Select, SixteenBitsUseTheDevicesTensorCores) {
  EXPECT_EQ(Auto(Half(), GpuOf(75)), KernelId::kCudaFlashFp32);
  EXPECT_EQ(Auto(Half(), GpuOf(80)), KernelId::kCudaFlashSm80);
  EXPECT_EQ(Auto(Half(), GpuOf(89)), KernelId::kCudaFlashSm80);
  EXPECT_EQ(Auto(Half(), GpuOf(90)), KernelId::kCudaFlashSm90);
  EXPECT_EQ(Auto(Half(), GpuOf(100)), KernelId::kCudaFlashSm80);
  EXPECT_EQ(Auto(Small(), GpuOf(90)), KernelId::kCudaFlashFp32) << "float32 stays float32";
}

// The obstacle to the fastest kernel is AUTO's reason, and the refusal if the kernel is forced.
TEST(Select, HoppersKernelNamesItsObstacle) {
  struct Case {
    const char* word;
    void (*change)(Problem*);
  };
  const Case cases[] = {
      {"bias", [](Problem* p) { p->has_bias = true; }},
      {"ALiBi", [](Problem* p) { p->has_alibi = true, p->dim = 136; }},
      {"scale", [](Problem* p) { p->scale = -1.0f; }},
      {"scale", [](Problem* p) { p->scale = 0.0f; }},
      {"16-byte", [](Problem* p) { p->dim = 60; }},
      {"16-byte", [](Problem* p) { p->dim_v = 3; }},
  };
  for (const Case& each : cases) {
    Problem problem = Half();
    each.change(&problem);
    const Result<Selection> chosen = Select(problem, GpuOf(90));
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80) << each.word;
    EXPECT_THAT(std::string(chosen->why), HasSubstr(each.word));
    const Result<Selection> forced = Select(problem, GpuOf(90), "cuda_flash_sm90");
    ASSERT_FALSE(forced.ok());
    EXPECT_EQ(forced.status().code(), Code::kUnimplemented);
    EXPECT_THAT(forced.status().message(), HasSubstr(each.word));
  }
  const Result<Selection> elsewhere =
      Select(Half(), GpuOf(90), "auto", MemoryTraits{.not_tma = "it lies elsewhere"});
  ASSERT_TRUE(elsewhere.ok());
  EXPECT_EQ(elsewhere->kernel, KernelId::kCudaFlashSm80);
  EXPECT_EQ(elsewhere->why, "it lies elsewhere");
}

// Eight query heads per KV head.
Problem Decoding(int64_t rows, int64_t keys) {
  return test::MakeSpec(2, 16, 2, rows, keys, 128, 128, DType::kBFloat16).problem;
}

TEST(Select, EveryKernelReadsPages) {
  for (const KernelInfo& kernel : Kernels()) {
    const bool on_gpu = kernel.device == DeviceKind::kCuda;
    Problem p = Decoding(1, 64);
    p.page_rows = 16;
    p.dtype = kernel.id == KernelId::kCudaFlashFp32 ? DType::kFloat32 : DType::kBFloat16;
    DeviceInfo device = on_gpu ? GpuOf(90) : Cpu();
    device.workspace_bytes_max = 1 << 30;
    device.not_amx = {};
    const Result<Selection> selection = Select(p, device, kernel.name);
    EXPECT_TRUE(selection.ok()) << kernel.name << ": " << selection.status().message();
  }
  Problem prefill = Decoding(300, 4096);
  prefill.page_rows = 64;
  EXPECT_EQ(Auto(prefill, GpuOf(90)), KernelId::kCudaFlashSm90);
  EXPECT_EQ(Auto(prefill, GpuOf(80)), KernelId::kCudaFlashSm80);
  prefill.dim = 200;
  EXPECT_EQ(Auto(prefill, GpuOf(90)), KernelId::kCudaFlashSm80) << "no registers for D256";
}

TEST(Select, TensorCoreKernelsRefuseOtherDevicesAndDTypes) {
  EXPECT_EQ(Select(Half(), GpuOf(80), "cuda_flash_sm90").status().code(), Code::kUnimplemented);
  EXPECT_EQ(Select(Half(), GpuOf(75), "cuda_flash_sm80").status().code(), Code::kUnimplemented);
  EXPECT_EQ(Select(Small(), GpuOf(90), "cuda_flash_sm80").status().code(), Code::kUnimplemented);
  EXPECT_EQ(Select(Small(), GpuOf(90), "cuda_flash_sm90").status().code(), Code::kUnimplemented);
  EXPECT_EQ(Select(Half(), GpuOf(90), "cuda_flash_sm80")->kernel, KernelId::kCudaFlashSm80);
}

TEST(SelectBackward, TheCpusKernelsHaveABackwardPass) {
  for (const std::string_view forced : {"", "auto", "cpu_flash"}) {
    const Result<Selection> flash = SelectBackward(Small(), Cpu(), forced);
    ASSERT_TRUE(flash.ok());
    EXPECT_EQ(flash->kernel, KernelId::kCpuFlash);
    EXPECT_FALSE(flash->why.empty());
  }
  const Result<Selection> reference = SelectBackward(Half(), Cpu(), "cpu_reference");
  ASSERT_TRUE(reference.ok());
  EXPECT_EQ(reference->kernel, KernelId::kCpuReference);
  EXPECT_EQ(reference->why, "asked for by name");
}

TEST(Select, OnlyTheReferenceSupportsFloat64AndOnlyByName) {
  Problem p = Small();
  p.dtype = DType::kFloat64;
  EXPECT_EQ(Select(p, Cpu(), "cpu_reference")->kernel, KernelId::kCpuReference);
  EXPECT_EQ(SelectBackward(p, Cpu(), "cpu_reference")->kernel, KernelId::kCpuReference);
  for (const std::string_view forced : {"", "auto", "cpu_flash"}) {
    for (const Status& refused :
         {Select(p, Cpu(), forced).status(), SelectBackward(p, Cpu(), forced).status()}) {
      EXPECT_EQ(refused.code(), Code::kUnimplemented) << forced;
      EXPECT_THAT(refused.message(), HasSubstr("float64 is computed only by cpu_reference"));
    }
  }
  for (const std::string_view forced : {"", "cuda_naive", "cuda_flash_fp32", "cuda_flash_sm80"}) {
    EXPECT_EQ(Select(p, GpuOf(90), forced).status().code(), Code::kUnimplemented) << forced;
  }
}

DeviceInfo RoomyGpuOf(int compute_capability) {
  DeviceInfo device = GpuOf(compute_capability);
  device.workspace_bytes_max = 1 << 30;
  return device;
}

// The obstacle to the fastest kernel is AUTO's reason, and the refusal if the kernel is forced.
TEST(SelectBackward, GpusHaveThreeBackwardKernels) {
  const Result<Selection> hopper = SelectBackward(Half(), RoomyGpuOf(90));
  ASSERT_TRUE(hopper.ok());
  EXPECT_EQ(hopper->kernel, KernelId::kCudaFlashSm90);
  struct Case {
    const char* word;
    void (*change)(Problem*);
    bool sm80 = true;
  };
  const Case cases[] = {
      {"bias", [](Problem* p) { p->has_bias = true; }},
      {"ALiBi", [](Problem* p) { p->has_alibi = true; }},
      {"dropout up to", [](Problem* p) { p->dim = 136, p->dropout = 655; }},
      {"key_offset", [](Problem* p) { p->key_offset = 24, p->dropout = 655; }, false},
      {"16-byte", [](Problem* p) { p->dim_v = 3; }},
      {"round float32 inputs", [](Problem* p) { p->dtype = DType::kFloat32; }, false},
  };
  for (const Case& each : cases) {
    Problem problem = Half();
    each.change(&problem);
    const Result<Selection> chosen = SelectBackward(problem, RoomyGpuOf(90));
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen->kernel, each.sm80 ? KernelId::kCudaFlashSm80 : KernelId::kCudaFlashFp32)
        << each.word;
    EXPECT_THAT(std::string(chosen->why), HasSubstr(each.word));
    EXPECT_EQ(SelectBackward(problem, RoomyGpuOf(90), "cuda_flash_sm80").ok(), each.sm80)
        << each.word;
    const Status forced = SelectBackward(problem, RoomyGpuOf(90), "cuda_flash_sm90").status();
    EXPECT_EQ(forced.code(), Code::kUnimplemented);
    EXPECT_THAT(forced.message(), HasSubstr(each.word));
  }
  Problem large = Half();
  large.dim = large.dim_v = kHeadDimMax;
  large.softcap = 30.0f;
  EXPECT_EQ(SelectBackward(large, RoomyGpuOf(90))->kernel, KernelId::kCudaFlashSm90);
  large.dim = large.dim_v = 128;
  large.dropout = 655;
  EXPECT_EQ(SelectBackward(large, RoomyGpuOf(90))->kernel, KernelId::kCudaFlashSm90);
  // Rows of 12 columns in rows of 16: the copy engine can address them, but stores of eight cannot.
  Problem odd = Half();
  odd.dim = 12;
  const Result<Selection> chosen = SelectBackward(odd, RoomyGpuOf(90), "", MemoryTraits{});
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm80);
  EXPECT_THAT(std::string(chosen->why), HasSubstr("multiples of 8"));
  EXPECT_EQ(SelectBackward(Half(), RoomyGpuOf(80))->kernel, KernelId::kCudaFlashSm80);
  EXPECT_EQ(SelectBackward(Half(), RoomyGpuOf(100))->kernel, KernelId::kCudaFlashSm80);
  EXPECT_EQ(SelectBackward(Half(), RoomyGpuOf(75))->kernel, KernelId::kCudaFlashFp32);
  EXPECT_TRUE(SelectBackward(Half(), RoomyGpuOf(80), "cuda_flash_fp32").ok());
  for (const std::string_view forced : {"cuda_naive", "cuda_decode_sm80", "cuda_decode_sm90"}) {
    const Status refused = SelectBackward(Half(), RoomyGpuOf(90), forced).status();
    EXPECT_EQ(refused.code(), Code::kUnimplemented) << forced;
    EXPECT_THAT(refused.message(), HasSubstr("it has none")) << forced;
  }
}

TEST(SelectBackward, GradientsOfFloat32UseCudaCores) {
  Problem problem = Half();
  problem.o_float32 = true;
  const Result<Selection> chosen = SelectBackward(problem, RoomyGpuOf(80));
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashFp32);
  EXPECT_THAT(std::string(chosen->why), HasSubstr("gradients of O"));
  const Status forced = SelectBackward(problem, RoomyGpuOf(80), "cuda_flash_sm80").status();
  EXPECT_THAT(forced.message(), HasSubstr("gradients of O"));
}

// The maximal number of short sequences: their terms dominate a GPU's workspace.
TEST(SelectBackward, TheTermsOfRowsMustFit) {
  Problem many = Half();
  many.batch = 1 << 20;
  many.packed = true;
  many.len_q = many.len_k = many.total_q = many.total_k = 0;
  DeviceInfo gpu = GpuOf(90);
  gpu.workspace_bytes_max = 1 << 30;
  const Result<Selection> fits = SelectBackward(many, gpu);
  ASSERT_TRUE(fits.ok());
  EXPECT_GE(fits->workspace_bytes, int64_t{8} * (4 << 20) * many.heads_q);
  gpu.workspace_bytes_max = fits->workspace_bytes - 1;
  const Status refused = SelectBackward(many, gpu).status();
  EXPECT_EQ(refused.code(), Code::kUnimplemented);
  EXPECT_THAT(refused.message(), HasSubstr(std::to_string(fits->workspace_bytes)));
  EXPECT_TRUE(SelectBackward(many, Cpu()).ok());
}

TEST(SelectBackward, NamesAreCheckedAsForTheForwardPass) {
  for (const std::string_view forced : {"cpu_flashy", "cuda_flash_sm90"}) {
    const Status backward = SelectBackward(Half(), Cpu(), forced).status();
    const Status forward = Select(Half(), Cpu(), forced).status();
    EXPECT_EQ(backward.code(), forward.code());
    EXPECT_EQ(backward.message(), forward.message());
  }
  EXPECT_EQ(SelectBackward(Half(), GpuOf(90), "cpu_flash").status().message(),
            Select(Half(), GpuOf(90), "cpu_flash").status().message());
}

}  // namespace
}  // namespace attend
