// SPDX-License-Identifier: Apache-2.0
//
// The kernels that Select chooses for Hopper's general kernels' problems, and for memory that is
// not aligned to 16 bytes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/contract/limits.h"
#include "kernels/contract/memory_traits.h"
#include "kernels/contract/select.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

DeviceInfo Gpu(int64_t workspace_bytes_max, int compute_capability = 90) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "cuda:3";
  device.compute_capability = compute_capability;
  device.workspace_bytes_max = workspace_bytes_max;
  return device;
}

Problem Half() { return test::MakeSpec(2, 4, 2, 16, 32, 64, 64, DType::kFloat16).problem; }

KernelId Auto(const Problem& problem, const DeviceInfo& device) {
  const Result<Selection> selection = Select(problem, device);
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  return selection->kernel;
}

TEST(SelectMemory, HopperSupportsScoreTermsAndFloats) {
  Problem p = Half();
  p.has_alibi = p.o_float32 = true;
  p.softcap = 20.0f;
  EXPECT_EQ(Auto(p, Gpu(0)), KernelId::kCudaFlashSm90);
  p.dim = p.dim_v = 128;
  p.len_q = 300;
  p.page_rows = 16;
  EXPECT_EQ(Auto(p, Gpu(0)), KernelId::kCudaFlashSm90);
  EXPECT_EQ(Auto(p, Gpu(0, 80)), KernelId::kCudaFlashSm80);
  p.page_rows = 0;
  p.has_alibi = false;
  p.dropout = 655;
  EXPECT_THAT(std::string(Select(p, Gpu(0))->why), HasSubstr("O in float32"));
  p.dropout = 0;
  p.dim_v = 136;
  EXPECT_THAT(std::string(Select(p, Gpu(0))->why), HasSubstr("O in float32"));
  p.dim_v = 128;
  SetBias(DType::kBit, &p);
  EXPECT_THAT(std::string(Select(p, Gpu(0))->why), HasSubstr("O in float32"));
}

// With room for a copy, Hopper's kernels are kept; without it, Q, K and V are read in place.
TEST(SelectMemory, HopperCopiesUnaddressableTensors) {
  Problem odd = Half();
  odd.dim = 60;
  odd.dim_v = 100;
  const int64_t rows = 2 * (4 * 16 + 2 * 32) * 64 * 2 + 2 * 2 * 32 * 104 * 2;
  EXPECT_EQ(ContiguousTraits(odd).repack_bytes, rows);
  const Result<Selection> chosen = Select(odd, Gpu(rows));
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(chosen->kernel, KernelId::kCudaFlashSm90);
  EXPECT_EQ(chosen->workspace_bytes, rows);
  EXPECT_THAT(std::string(chosen->why), HasSubstr("copied"));
  EXPECT_EQ(Select(odd, Gpu(rows), "cuda_flash_sm90")->workspace_bytes, rows);
  EXPECT_EQ(Select(odd, Gpu(rows), "cuda_flash_sm80")->workspace_bytes, 0);
  EXPECT_EQ(Auto(odd, Gpu(rows - 1)), KernelId::kCudaFlashSm80);
  EXPECT_EQ(Select(odd, Gpu(rows - 1), "cuda_flash_sm90").status().code(), Code::kUnimplemented);
  Problem half = odd;
  half.dim_v = 64;
  EXPECT_LT(ContiguousTraits(half).repack_bytes, rows) << "V stays where it is";
  EXPECT_EQ(SelectBackward(odd, Gpu(1 << 30))->kernel, KernelId::kCudaFlashSm80);
  odd.page_rows = 16;
  EXPECT_EQ(Auto(odd, Gpu(1 << 30)), KernelId::kCudaFlashSm80) << "pages are not copied";
}

TEST(SelectMemory, TheCopysSizeIsBounded) {
  EXPECT_EQ(*RepackedBytes(1, 1, 1, 1), 256);
  EXPECT_EQ(*RepackedBytes(0, 1, 1, 1), 256);
  EXPECT_EQ(*RepackedBytes(2, 3, 5, 100), (2 * 3 * 5 * 208 + 255) / 256 * 256);
  EXPECT_FALSE(RepackedBytes(1, kHeadsMax, kLengthMax, 255).ok());
  EXPECT_FALSE(RepackedBytes(1, 1, INT64_MAX, 255).ok());
  EXPECT_FALSE(RepackedBytes(1, 1, int64_t{1} << 36, 1).ok());
  Problem huge = Half();
  huge.dim = huge.dim_v = 255;
  huge.batch = kBatchMax;
  huge.heads_q = huge.heads_kv = kHeadsMax;
  huge.len_q = huge.len_k = kLengthMax;
  EXPECT_EQ(ContiguousTraits(huge).repack_bytes, 0);
  EXPECT_EQ(Auto(huge, Gpu(INT64_MAX)), KernelId::kCudaFlashSm80);
}

TEST(SelectMemory, DecodingReadsACopy) {
  const Problem p = test::MakeSpec(2, 16, 2, 1, 512, 128, 128, DType::kBFloat16).problem;
  const MemoryTraits copied{.not_tma = "it lies elsewhere", .repack_bytes = 1000};
  const Result<Selection> decodes = Select(p, Gpu(1000), "", copied);
  EXPECT_EQ(decodes->kernel, KernelId::kCudaDecodeSm80);
  EXPECT_EQ(decodes->workspace_bytes, 1000);
  EXPECT_THAT(std::string(decodes->why), HasSubstr("copied"));
  EXPECT_EQ(Select(p, Gpu(999), "", copied)->kernel, KernelId::kCudaFlashSm80);
}

// A metric's label; requested precision, and devices without a faster kernel, have none.
TEST(SelectMemory, NamesTheReasonAgainstTheFastestKernel) {
  const Problem decodes = test::MakeSpec(2, 16, 2, 1, 512, 128, 128, DType::kBFloat16).problem;
  const auto changed = [](Problem p, void (*change)(Problem&)) {
    change(p);
    return p;
  };
  const auto odd = changed(Half(), [](Problem& p) { p.dim = 60; });
  const auto biased = [](Problem& p) { p.has_bias = true; };
  const auto drops = [](Problem& p) { p.dropout = 100, p.key_offset = 3; };
  struct Case {
    Problem problem;
    int64_t workspace_bytes_max;
    Fallback fallback;
  };
  const Case cases[] = {
      {Half(), 0, Fallback::kNone},
      {decodes, 0, Fallback::kNone},
      {changed(Half(), [](Problem& p) { p.dtype = DType::kFloat32; }), 0, Fallback::kNone},
      {changed(Half(), biased), 0, Fallback::kBias},
      {changed(Half(), drops), 0, Fallback::kDropout},
      {changed(Half(), [](Problem& p) { p.has_alibi = true, p.dim = 136; }), 0, Fallback::kAlibi},
      {changed(Half(), [](Problem& p) { p.o_float32 = true, p.dim = 136; }), 0,
       Fallback::kFloat32Output},
      {changed(Half(), [](Problem& p) { p.page_rows = 16, p.dim = 200, p.len_q = 256; }), 0,
       Fallback::kPages},
      {changed(Half(), [](Problem& p) { p.scale = 0; }), 0, Fallback::kScale},
      {odd, 0, Fallback::kAlignment},
      {odd, 1 << 30, Fallback::kAlignedCopy},
      {changed(decodes, biased), 0, Fallback::kBias},
      {changed(decodes, [](Problem& p) { p.has_bias = p.bias_bits = true; }), 0, Fallback::kNone},
  };
  for (const Case& each : cases) {
    const Result<Selection> chosen = Select(each.problem, Gpu(each.workspace_bytes_max));
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(kFallbackNames[static_cast<size_t>(chosen->fallback)],
              kFallbackNames[static_cast<size_t>(each.fallback)])
        << chosen->why;
    EXPECT_EQ(Select(each.problem, Gpu(1 << 30), "cuda_flash_fp32")->fallback, Fallback::kNone);
  }
  const auto backward = [&](void (*change)(Problem&)) {
    return SelectBackward(changed(Half(), change), Gpu(1 << 30))->fallback;
  };
  EXPECT_EQ(backward(biased), Fallback::kBias);
  EXPECT_EQ(backward([](Problem& p) { p.softcap = 300; }), Fallback::kSoftcap);
  EXPECT_EQ(backward([](Problem&) {}), Fallback::kNone);
}

}  // namespace
}  // namespace attend
