// SPDX-License-Identifier: Apache-2.0
//
// What the C ABI refuses before it asks a device anything; runs without a GPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/c/attend_c.h"

namespace attend::test {
namespace {

float memory[16];  // never read: every call here is refused

attend_params Good() {
  attend_params params = {};
  params.struct_bytes = sizeof(params);
  params.dtype = ATTEND_FLOAT16;
  params.batch = params.heads_q = params.heads_kv = 1;
  params.len_q = params.len_k = 1;
  params.dim = params.dim_v = 8;
  params.window_left = params.window_right = -1;
  params.scale = 1;
  params.q = params.k = params.v = params.o = {memory, 8, 8, 8};
  params.config = -1;
  return params;
}

void ExpectSays(const std::string& words) {
  EXPECT_NE(std::string(attend_last_error()).find(words), std::string::npos) << attend_last_error();
}

TEST(AttendCArguments, AreNamedWithValueAndBound) {
  const auto expect = [](attend_params params, const char* words) {
    EXPECT_EQ(attend_run(&params, nullptr), ATTEND_INVALID_ARGUMENT);
    ExpectSays(words);
  };
  EXPECT_EQ(attend_run(nullptr, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params is NULL");
  attend_params bad = Good();
  bad.struct_bytes = 8;
  expect(bad, "struct_bytes is 8, this library's attend_params has");
  bad = Good();
  bad.dtype = 9;
  expect(bad, "dtype is 9, must be in [1, 3]");
  bad = Good();
  bad.alignment = 2;
  expect(bad, "alignment is 2, must be in [0, 1]");
  bad = Good();
  bad.bias = memory;
  bad.bias_dtype = 0;
  expect(bad, "bias_dtype is 0");
  bad = Good();
  bad.dim = 257;
  expect(bad, "257");
  bad = Good();
  bad.v.data = nullptr;
  expect(bad, "v is NULL, but has 8 elements");
  bad = Good();
  bad.packed = 1;
  bad.total_q = bad.total_k = 1;
  expect(bad, "q_offsets");
}

TEST(AttendCArguments, OutputsHaveAPlaceForEveryElement) {
  const auto run = [](attend_tensor o, int64_t lse_stride_b, int64_t lse_stride_h) {
    attend_params params = Good();
    params.device = 1 << 20;  // there is none: what was not refused before asks for it
    params.batch = 2;
    params.heads_q = 3;
    params.len_q = 4;
    params.o = o;
    params.lse = memory;
    params.lse_stride_b = lse_stride_b;
    params.lse_stride_h = lse_stride_h;
    attend_run(&params, nullptr);
    return std::string(attend_last_error());
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const auto& [b, h, l] : std::vector<std::array<int64_t, 3>>{
           {96, 32, 8}, {96, 8, 24}, {32, 64, 8}, {8, 64, 16}, {-96, -32, -8}, {1000, 100, 9}}) {
    EXPECT_THAT(run({memory, b, h, l}, 12, 4), testing::HasSubstr("cuda:1048576")) << b << h << l;
  }
  for (const auto& [b, h, l] : std::vector<std::array<int64_t, 3>>{{0, 32, 8},
                                                                   {96, 0, 8},
                                                                   {96, 32, 0},
                                                                   {96, 32, 7},
                                                                   {96, 31, 8},
                                                                   {95, 32, 8},
                                                                   {-95, 32, 8},
                                                                   {96, 8, 16},
                                                                   {kMost, kMost, 8},
                                                                   {0, 0, 0}}) {
    const std::string strides =
        std::to_string(b) + ", " + std::to_string(h) + " and " + std::to_string(l);
    EXPECT_THAT(run({memory, b, h, l}, 12, 4), testing::HasSubstr("o has strides " + strides));
  }
  for (const auto& [b, h] : std::vector<std::array<int64_t, 2>>{{12, 3}, {0, 4}, {11, 4}, {4, 4}}) {
    EXPECT_THAT(run({memory, 96, 32, 8}, b, h), testing::HasSubstr("lse has strides")) << b << h;
  }
  EXPECT_THAT(run({memory, 96, 32, 8}, 4, 8), testing::HasSubstr("cuda:1048576"));
}

TEST(AttendCArguments, OfPartsOfTheKeys) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const auto expect = [](int64_t before, int64_t after, const std::string& words) {
    attend_params bad = Good();
    bad.key_offset = before;
    bad.keys_after = after;
    EXPECT_EQ(attend_run(&bad, nullptr), ATTEND_INVALID_ARGUMENT);
    ExpectSays(words);
  };
  expect(-1, 0, "key offset is -1, must be in [0, 1073741824]");
  expect(0, INT64_MIN, "keys after the part is -9223372036854775808, must be in");
  expect(0, kMost + 1, "keys after the part is 1073741825, must be in");
  expect(kMost, kMost, "keys of the whole is 21474836");
}

TEST(AttendCArguments, OfDropoutAndBits) {
  const auto expect = [](const attend_params& params, int32_t code, const char* words) {
    EXPECT_EQ(attend_run(&params, nullptr), code);
    ExpectSays(words);
  };
  for (const float p : {-0.5f, 1.0f, 0.999995f, std::numeric_limits<float>::quiet_NaN()}) {
    attend_params bad = Good();
    bad.dropout_p = p;
    expect(bad, ATTEND_INVALID_ARGUMENT, "must be in [0, 1 - 2^-17)");
  }
  attend_params bad = Good();
  bad.dropout_p = 1.5f;
  expect(bad, ATTEND_INVALID_ARGUMENT, "dropout_p is 1.5");
  bad = Good();
  bad.dropout_head = -1;
  expect(bad, ATTEND_INVALID_ARGUMENT, "dropout_head is -1, must be in [0, 4294967295]");
  bad = Good();
  bad.bias = memory;
  bad.bias_dtype = 5;
  expect(bad, ATTEND_INVALID_ARGUMENT, "bias_dtype is 5, must be in [1, 4]");
  bad.bias_dtype = ATTEND_BIT;
  bad.bias_stride_h = 9;
  expect(bad, ATTEND_INVALID_ARGUMENT,
         "bias_stride_h is 9, must be a multiple of 8 for a bias of bits");
  bad = Good();
  bad.dtype = ATTEND_BIT;
  expect(bad, ATTEND_INVALID_ARGUMENT, "dtype is 4, must be in [1, 3]");
}

TEST(AttendCArguments, PagesAreCheckedBeforeTheyAreRead) {
  const auto expect = [](const attend_params& params, const char* words) {
    EXPECT_EQ(attend_run(&params, nullptr), ATTEND_INVALID_ARGUMENT);
    ExpectSays(words);
  };
  const int32_t pages[] = {0};
  attend_params bad = Good();
  bad.page_rows = 16;
  expect(bad, "kv_pages is NULL, but page_rows is 16");
  bad.kv_pages = pages;
  bad.page_rows = 24;
  expect(bad, "rows of a page are 24, must be a power of two");
  bad.page_rows = 8;
  expect(bad, "rows of a page");
  bad.page_rows = -16;
  expect(bad, "rows of a page");
  bad.page_rows = 16;
  bad.packed = 1;
  bad.total_q = bad.total_k = 1;
  expect(bad, "must not be packed");
}

TEST(AttendCArguments, ABatchSaysWhichOfItsParams) {
  std::array<attend_params, 3> params = {Good(), Good(), Good()};
  const auto run = [&](int32_t count) {
    return attend_run_batch(params.data(), count, nullptr, 0, nullptr);
  };
  EXPECT_EQ(run(0), ATTEND_OK);
  EXPECT_EQ(attend_run_batch(nullptr, 0, nullptr, 0, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_run_batch(nullptr, 1, nullptr, 0, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params is NULL");
  EXPECT_EQ(run(-1), ATTEND_INVALID_ARGUMENT);
  ExpectSays("count is -1, must be in [0, ");
  params[2].device = 1;
  EXPECT_EQ(run(3), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params[2].device is 1, must be params[0].device, 0");
  params[1].dtype = 4;
  EXPECT_EQ(run(3), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params[1]: dtype is 4");
  params[1] = Good();
  params[1].q.data = nullptr;
  EXPECT_EQ(run(2), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params[1]: q is NULL");
}

TEST(AttendCArguments, QuestionsNeedAPlaceForTheAnswer) {
  attend_params params = Good();
  EXPECT_EQ(attend_workspace_bytes(&params, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("bytes is NULL");
  EXPECT_EQ(attend_batch_workspace_bytes(&params, 1, nullptr), ATTEND_INVALID_ARGUMENT);
  int64_t bytes = 0;
  EXPECT_EQ(attend_workspace_bytes(nullptr, &bytes), ATTEND_INVALID_ARGUMENT);
  EXPECT_EQ(attend_batch_workspace_bytes(nullptr, 0, &bytes), ATTEND_OK);
  const char* kernel = nullptr;
  EXPECT_EQ(attend_select(nullptr, &kernel, nullptr), ATTEND_INVALID_ARGUMENT);
  EXPECT_EQ(attend_device_count(nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("count is NULL");
  int32_t count = -1;
  EXPECT_EQ(attend_device_count(&count), ATTEND_OK) << attend_last_error();
  EXPECT_GE(count, 0);
}

TEST(AttendCArguments, MemoryFunctionsCheckBeforeTheyTouch) {
  void* data = memory;
  EXPECT_EQ(attend_malloc(0, -1, &data), ATTEND_INVALID_ARGUMENT);
  ExpectSays("bytes is -1, must be at least 0");
  EXPECT_EQ(attend_malloc(0, 1, nullptr), ATTEND_INVALID_ARGUMENT);
  EXPECT_EQ(attend_malloc(0, 0, &data), ATTEND_OK);
  EXPECT_EQ(data, nullptr);
  EXPECT_EQ(attend_free(0, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_memcpy(0, memory, memory, 1, 0, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("kind is 0, must be in [1, 3]");
  EXPECT_EQ(attend_memcpy(0, nullptr, memory, 1, ATTEND_HOST_TO_DEVICE, nullptr),
            ATTEND_INVALID_ARGUMENT);
  ExpectSays("to is NULL");
  EXPECT_EQ(attend_memcpy(0, nullptr, nullptr, 0, ATTEND_HOST_TO_DEVICE, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_memset(0, memory, 256, 1, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("value is 256, must be in [0, 255]");
  EXPECT_EQ(attend_memset(0, memory, 0, -8, nullptr), ATTEND_INVALID_ARGUMENT);
  // What CUDA says of it, or that the build has none.
  const int32_t code = attend_malloc(1 << 20, 1, &data);
  EXPECT_TRUE(code == ATTEND_INTERNAL || code == ATTEND_UNIMPLEMENTED) << code;
  ExpectSays("cuda:1048576");
  EXPECT_EQ(attend_malloc(-2, 1, &data), ATTEND_INVALID_ARGUMENT);
  ExpectSays("device is -2, must be an ordinal of at least 0 or ATTEND_CPU, -1");
}

TEST(AttendCArguments, OfTheBackwardPass) {
  float lse = 0;
  attend_backward_params good = {};
  good.struct_bytes = sizeof(good);
  good.attention = Good();
  good.attention.device = ATTEND_CPU;
  good.attention.lse = &lse;
  good.d_o = good.attention.o;
  const auto expect = [](const attend_backward_params& params, int32_t code, const char* words) {
    EXPECT_EQ(attend_run_backward(&params, nullptr), code);
    ExpectSays(words);
  };
  EXPECT_EQ(attend_run_backward(nullptr, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params is NULL");
  attend_backward_params bad = good;
  bad.struct_bytes = sizeof(attend_params);
  expect(bad, ATTEND_INVALID_ARGUMENT, "this library's attend_backward_params has");
  bad = good;
  bad.attention.struct_bytes = 8;
  expect(bad, ATTEND_INVALID_ARGUMENT, "struct_bytes is 8, this library's attend_params has");
  bad = good;
  bad.attention.lse = nullptr;
  expect(bad, ATTEND_INVALID_ARGUMENT, "lse is missing");
  bad = good;
  bad.attention.config = 0;
  expect(bad, ATTEND_INVALID_ARGUMENT, "config is 0, must be in [-1, -1]");
  bad = good;
  bad.d_o.data = nullptr;
  expect(bad, ATTEND_INVALID_ARGUMENT, "d_o is NULL, but has 8 elements");
  bad = good;
  bad.attention.heads_q = 2;
  bad.d_q = bad.attention.q;
  bad.d_q.data = memory;
  bad.d_q.stride_h = 0;
  expect(bad, ATTEND_INVALID_ARGUMENT,
         "d_q has strides 8, 0 and 8, by which it may overlap itself");
  bad.d_q.stride_h = 7;
  expect(bad, ATTEND_INVALID_ARGUMENT,
         "d_q has strides 8, 7 and 8, by which it may overlap itself");
  bad = good;
  bad.d_bias = memory;
  expect(bad, ATTEND_INVALID_ARGUMENT, "d_bias is asked for, there is no bias");
  bad = good;
  bad.attention.bias = memory;
  bad.attention.bias_dtype = ATTEND_BIT;
  bad.d_bias = memory;
  expect(bad, ATTEND_INVALID_ARGUMENT, "d_bias is asked for, the bias is a mask of bits");
  bad = good;
  bad.d_sinks = memory;
  expect(bad, ATTEND_INVALID_ARGUMENT, "d_sinks are asked for, there are no sinks");
  bad = good;
  const int32_t pages[] = {0};
  bad.attention.page_rows = 16;
  bad.attention.len_k = 16;
  bad.attention.kv_pages = pages;
  expect(bad, ATTEND_UNIMPLEMENTED, "gradients of keys in pages");
  bad = good;
  bad.attention.kernel = "cuda_flash_fp32";
  expect(bad, ATTEND_UNIMPLEMENTED, "kernel cuda_flash_fp32 does not run on cpu");
  EXPECT_EQ(attend_backward_workspace_bytes(&good, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("bytes is NULL");
}

}  // namespace
}  // namespace attend::test
