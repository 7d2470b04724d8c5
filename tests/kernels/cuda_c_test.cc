// SPDX-License-Identifier: Apache-2.0
//
// The C ABI: the same answers as the C++ interface, and refusals that name the field.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/attend_c.h"
#include "kernels/check_rows.h"
#include "tests/kernels/cuda_run.h"

namespace attend::test {
namespace {

attend_tensor Tensor(const void* data, int64_t b, int64_t h, int64_t l) {
  return {const_cast<void*>(data), b, h, l};
}

// The C struct of an attention whose memory is on the device.
attend_params Params(const Attention& a) {
  const Problem& p = a.problem;
  attend_params params = {};
  params.struct_bytes = sizeof(params);
  params.dtype = static_cast<int32_t>(p.dtype);
  params.batch = p.batch;
  params.heads_q = p.heads_q;
  params.heads_kv = p.heads_kv;
  params.len_q = p.len_q;
  params.len_k = p.len_k;
  params.dim = p.dim;
  params.dim_v = p.dim_v;
  params.packed = p.packed;
  params.alignment = static_cast<int32_t>(p.mask.alignment);
  params.total_q = p.total_q;
  params.total_k = p.total_k;
  params.window_left = p.mask.left;
  params.window_right = p.mask.right;
  params.scale = p.scale;
  params.softcap = p.softcap;
  params.q = Tensor(a.q.data, a.q.stride_b, a.q.stride_h, a.q.stride_l);
  params.k = Tensor(a.k.data, a.k.stride_b, a.k.stride_h, a.k.stride_l);
  params.v = Tensor(a.v.data, a.v.stride_b, a.v.stride_h, a.v.stride_l);
  params.o = Tensor(a.o.data, a.o.stride_b, a.o.stride_h, a.o.stride_l);
  params.lse = a.lse;
  params.lse_stride_b = a.lse_stride_b;
  params.lse_stride_h = a.lse_stride_h;
  params.bias = a.bias.data;
  params.bias_stride_b = a.bias.stride_b;
  params.bias_stride_h = a.bias.stride_h;
  params.bias_stride_q = a.bias.stride_q;
  params.bias_dtype = static_cast<int32_t>(a.bias.dtype);
  params.config = -1;
  params.alibi_slopes = a.alibi_slopes;
  params.alibi_stride_b = a.alibi_stride_b;
  params.sinks = a.sinks;
  params.q_lengths = a.q_lengths;
  params.kv_lengths = a.kv_lengths;
  params.q_offsets = a.q_offsets;
  params.kv_offsets = a.kv_offsets;
  return params;
}

TEST(AttendC, GivesTheBitsOfTheCppInterface) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < 60; ++n) {
    OwnedAttention owned = MakeAttention(RandomSpec(seed + n, 3e5), seed + n);
    for (const KernelId kernel : {KernelId::kCudaNaive, KernelId::kCudaFlashFp32}) {
      owned.ResetOutput();
      DeviceRun run(&owned, kernel);
      ASSERT_TRUE(run.Run().ok());
      const std::vector<std::byte> expected = owned.OutputBytes();

      attend_params params = Params(run.attention());
      const std::string name(KernelName(kernel));
      params.kernel = name.c_str();
      ASSERT_EQ(attend_workspace_bytes(&params, &params.workspace_bytes), ATTEND_OK)
          << attend_last_error();
      const DeviceMemory workspace(params.workspace_bytes + 1);
      params.workspace = workspace.get();
      owned.ResetOutput();
      // Where the first byte of the output block lies on the device.
      char* output =
          static_cast<char*>(params.o.data) -
          (static_cast<char*>(owned.attention.o.data) - static_cast<char*>(owned.output.data));
      const auto bytes = static_cast<size_t>(owned.output.bytes);
      ASSERT_EQ(cudaMemcpy(output, owned.output.data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
      ASSERT_EQ(attend_run(&params, nullptr), ATTEND_OK) << attend_last_error();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(owned.output.data, output, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      EXPECT_EQ(expected, owned.OutputBytes()) << name << " ATTEND_TEST_SEED=" << seed + n;
    }
  }
}

TEST(AttendC, RefusalsNameTheField) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 8, 8, 16, 16), FreshSeed());
  DeviceRun run(&owned, KernelId::kCudaNaive);
  ASSERT_TRUE(run.Run().ok());
  const attend_params good = Params(run.attention());
  const auto expect = [](attend_params params, int32_t code, const char* word) {
    EXPECT_EQ(attend_run(&params, nullptr), code);
    EXPECT_NE(std::string(attend_last_error()).find(word), std::string::npos)
        << attend_last_error();
  };
  attend_params bad = good;
  bad.struct_bytes = 8;
  expect(bad, ATTEND_INVALID_ARGUMENT, "struct_bytes");
  bad = good;
  bad.dtype = 9;
  expect(bad, ATTEND_INVALID_ARGUMENT, "dtype");
  bad = good;
  bad.dim = 257;
  expect(bad, ATTEND_INVALID_ARGUMENT, "257");
  bad = good;
  bad.heads_kv = 3;
  expect(bad, ATTEND_INVALID_ARGUMENT, "heads");
  bad = good;
  bad.k.data = nullptr;
  expect(bad, ATTEND_INVALID_ARGUMENT, "k is NULL");
  bad = good;
  bad.kernel = "no_such_kernel";
  expect(bad, ATTEND_INVALID_ARGUMENT, "no_such_kernel");
  bad = good;
  bad.kernel = "cpu_flash";
  expect(bad, ATTEND_UNIMPLEMENTED, "cpu_flash");
  bad = good;
  bad.kernel = "cuda_naive";  // without its workspace
  expect(bad, ATTEND_INVALID_ARGUMENT, "workspace_bytes");
  bad = good;
  bad.device = 4096;
  expect(bad, ATTEND_INTERNAL, "cuda:4096");
  attend_params again = good;
  EXPECT_EQ(attend_run(&again, nullptr), ATTEND_OK);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(AttendC, NamesItsConfigs) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 8, 8, 128, 128), FreshSeed());
  attend_params params = Params(owned.attention);
  int32_t count = 0;
  ASSERT_EQ(attend_configs(&params, &count), ATTEND_OK) << attend_last_error();
  ASSERT_GE(count, 1);
  for (int32_t n = 0; n < count; ++n) EXPECT_STRNE(attend_config_name(&params, n), "");
  EXPECT_STREQ(attend_config_name(&params, count), "");
}

}  // namespace
}  // namespace attend::test
