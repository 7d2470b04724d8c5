// SPDX-License-Identifier: Apache-2.0
//
// How many rows and keys Select has decoded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/contract/select.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

DeviceInfo GpuOf(int compute_capability) {
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

// Eight query heads per KV head.
Problem Decoding(int64_t rows, int64_t keys) {
  return test::MakeSpec(2, 16, 2, rows, keys, 128, 128, DType::kBFloat16).problem;
}

TEST(SelectDecode, FewRowsAndManyKeysAreDecoded) {
  EXPECT_EQ(Auto(Decoding(1, 512), GpuOf(90)), KernelId::kCudaDecodeSm80) << "eight rows";
  EXPECT_EQ(Auto(Decoding(1, 64), GpuOf(90)), KernelId::kCudaDecodeSm80);
  EXPECT_EQ(Auto(Decoding(1, 63), GpuOf(90)), KernelId::kCudaFlashSm90);
  EXPECT_EQ(Auto(Decoding(2, 512), GpuOf(90)), KernelId::kCudaDecodeSm80) << "sixteen rows";
  EXPECT_EQ(Auto(Decoding(3, 512), GpuOf(90)), KernelId::kCudaDecodeSm90) << "24 rows";
  EXPECT_EQ(Auto(Decoding(3, 512), GpuOf(80)), KernelId::kCudaDecodeSm80);
  EXPECT_EQ(Auto(Decoding(8, 1 << 20), GpuOf(80)), KernelId::kCudaDecodeSm80);
  EXPECT_EQ(Auto(Decoding(9, 4096), GpuOf(90)), KernelId::kCudaDecodeSm90) << "72 rows";
  EXPECT_EQ(Auto(Decoding(9, 2047), GpuOf(90)), KernelId::kCudaFlashSm90);
  Problem alone = Decoding(100, 4096);
  alone.heads_q = alone.heads_kv;
  EXPECT_EQ(Auto(alone, GpuOf(90)), KernelId::kCudaFlashSm90)
      << "each head has a KV head of its own";
  EXPECT_EQ(Auto(Decoding(2, 511), GpuOf(90)), KernelId::kCudaFlashSm90);
  EXPECT_EQ(Auto(Decoding(1, 4096), GpuOf(75)), KernelId::kCudaFlashFp32);
  Problem biased = Decoding(1, 4096);
  biased.has_bias = true;
  EXPECT_EQ(Auto(biased, GpuOf(90)), KernelId::kCudaFlashSm80);
  Problem masked = Decoding(8, 4096);
  masked.has_bias = masked.bias_bits = true;
  EXPECT_EQ(Auto(masked, GpuOf(90)), KernelId::kCudaDecodeSm90);
  masked.page_rows = 16;
  EXPECT_EQ(Auto(masked, GpuOf(90)), KernelId::kCudaDecodeSm90);
  Problem odd = Decoding(1, 4096);
  odd.dim_v = 100;
  EXPECT_EQ(Auto(odd, GpuOf(90)), KernelId::kCudaFlashSm80);
  const auto refusal = [](const Problem& p) {
    return Select(p, GpuOf(90), "cuda_decode_sm80").status().message();
  };
  EXPECT_THAT(refusal(biased), HasSubstr("bias"));
  EXPECT_THAT(refusal(odd), HasSubstr("multiples of 8"));
  EXPECT_THAT(refusal(Decoding(513, 64)), HasSubstr("512 query rows"));
  EXPECT_THAT(refusal(test::MakeSpec(2, 4, 2, 16, 32, 64, 64).problem), HasSubstr("float32"));
  EXPECT_TRUE(Select(Decoding(512, 0), GpuOf(90), "cuda_decode_sm80").ok());
  EXPECT_TRUE(Select(Decoding(512, 0), GpuOf(90), "cuda_decode_sm90").ok());
  EXPECT_THAT(Select(Decoding(16, 0), GpuOf(80), "cuda_decode_sm90").status().message(),
              HasSubstr("Hopper"));
  EXPECT_EQ(Auto(Decoding(3, 512), GpuOf(100)), KernelId::kCudaDecodeSm80);
  const MemoryTraits elsewhere{.not_tma = "it lies elsewhere"};
  EXPECT_THAT(Select(Decoding(1, 64), GpuOf(90), "cuda_decode_sm80", elsewhere).status().message(),
              HasSubstr("16-byte"));
}

// Chunks of 128 rows, as long as twice their number is no more than the flash kernel's tiles.
TEST(SelectDecode, MoreRowsAreDecodedInChunks) {
  const auto decodes = [](const Problem& p, int compute_capability) {
    const KernelId kernel = Auto(p, GpuOf(compute_capability));
    return kernel == KernelId::kCudaDecodeSm80 || kernel == KernelId::kCudaDecodeSm90;
  };
  for (const int compute_capability : {80, 90}) {
    for (const int64_t rows : {17, 24, 32, 33, 64}) {
      Problem p = Decoding(rows, 32768);
      EXPECT_TRUE(decodes(p, compute_capability)) << rows;
      p.batch = 64;
      EXPECT_TRUE(decodes(p, compute_capability)) << "a batch's bits are each sequence's";
      const int64_t chunks = (8 * rows + 127) / 128;
      EXPECT_TRUE(decodes(Decoding(rows, 2048 * chunks), compute_capability)) << rows;
      EXPECT_FALSE(decodes(Decoding(rows, 2048 * chunks - 1), compute_capability)) << rows;
    }
    for (const int64_t rows : {65, 128, 129, 512, 513}) {
      EXPECT_FALSE(decodes(Decoding(rows, 1 << 20), compute_capability)) << rows;
    }
  }
  EXPECT_EQ(Auto(Decoding(17, 4096), GpuOf(90)), KernelId::kCudaDecodeSm90);
  EXPECT_EQ(Auto(Decoding(17, 4096), GpuOf(80)), KernelId::kCudaDecodeSm80);
  Problem p = Decoding(40, 1 << 20);
  p.heads_q = 3 * p.heads_kv;
  EXPECT_FALSE(decodes(p, 90)) << "three heads share a KV head";
  p.heads_q = 4 * p.heads_kv;
  EXPECT_TRUE(decodes(p, 90));
  p.heads_q = 256 * p.heads_kv;
  p.len_q = 1;
  EXPECT_TRUE(decodes(p, 90)) << "256 heads share a KV head";
  p = Decoding(40, 1 << 20);
  p.dim = p.dim_v = 256;
  EXPECT_TRUE(decodes(p, 90));
  EXPECT_FALSE(decodes(p, 80)) << "shared memory may not have room";
  p.len_q = 16;
  EXPECT_TRUE(decodes(p, 80));
}

// Sequences of a request may be sessions of any lengths; none may change another's bits.
TEST(SelectDecode, InPagesTheLengthDoesNotChangeTheKernel) {
  for (const int compute_capability : {80, 90}) {
    for (const int64_t rows : {1, 2, 3, 8, 9, 16, 17, 40, 64, 65, 300}) {
      Problem p = Decoding(rows, 1);
      p.page_rows = 16;
      const KernelId alone = Auto(p, GpuOf(compute_capability));
      for (const int64_t keys : {63, 64, 511, 512, 2047, 2048, 1 << 20}) {
        p.len_k = keys;
        EXPECT_EQ(Auto(p, GpuOf(compute_capability)), alone) << rows << " rows, " << keys;
      }
    }
  }
}

}  // namespace
}  // namespace attend
