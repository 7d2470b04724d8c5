// SPDX-License-Identifier: Apache-2.0
//
// Arguments that the C ABI refuses before it touches a device; runs without a GPU.

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

void Pack(attend_params& params) {
  params.packed = 1;
  params.total_q = params.total_k = 1;
  params.q = params.k = params.v = params.o = {memory, 0, 8, 8};
}

void ExpectSays(const std::string& words) {
  EXPECT_NE(std::string(attend_last_error()).find(words), std::string::npos) << attend_last_error();
}

// Changes valid parameters, and the expected message.
struct Bad {
  const char* words;
  void (*change)(attend_params& params);
};

void ExpectRefused(const std::vector<Bad>& all) {
  for (const Bad& bad : all) {
    SCOPED_TRACE(bad.words);
    attend_params params = Good();
    bad.change(params);
    EXPECT_EQ(attend_run(&params, nullptr), ATTEND_INVALID_ARGUMENT);
    ExpectSays(bad.words);
  }
}

TEST(AttendCArguments, ErrorsNameArgumentValueAndBound) {
  EXPECT_EQ(attend_run(nullptr, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params is NULL");
  ExpectRefused({
      {"struct_bytes is 8, this library's attend_params has", [](auto& p) { p.struct_bytes = 8; }},
      {"dtype is 9, must be in [1, 3]", [](auto& p) { p.dtype = 9; }},
      {"dtype is 4, must be in [1, 3]", [](auto& p) { p.dtype = ATTEND_BIT; }},
      {"alignment is 2, must be in [0, 1]", [](auto& p) { p.alignment = 2; }},
      {"bias_dtype is 0", [](auto& p) { p.bias = memory; }},
      {"257", [](auto& p) { p.dim = 257; }},
      {"v is NULL, but has 8 elements", [](auto& p) { p.v.data = nullptr; }},
      {"q_offsets", [](auto& p) { Pack(p); }},
      {"k.stride_b is 8, must be 0 of packed", [](auto& p) { Pack(p), p.k.stride_b = 8; }},
      {"lse_stride_b is 1, must be 0 of packed", [](auto& p) { Pack(p), p.lse_stride_b = 1; }},
  });
}

TEST(AttendCArguments, OutputsWithOverlappingElementsAreRefused) {
  const auto run = [](attend_tensor o, int64_t lse_stride_b, int64_t lse_stride_h) {
    attend_params params = Good();
    params.device = 1 << 20;  // there is no such device
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

TEST(AttendCArguments, PartsOfTheKeysAreChecked) {
  ExpectRefused({
      {"key offset is -1, must be in [0, 1073741824]", [](auto& p) { p.key_offset = -1; }},
      {"keys after the part is -9223372036854775808, must be in",
       [](auto& p) { p.keys_after = INT64_MIN; }},
      {"keys after the part is 1073741825, must be in",
       [](auto& p) { p.keys_after = (1 << 30) + 1; }},
      {"keys of the whole is 21474836", [](auto& p) { p.key_offset = p.keys_after = 1 << 30; }},
  });
}

TEST(AttendCArguments, SoftcapDropoutAndBitsAreChecked) {
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
  ExpectRefused({
      {"softcap is 1e-45, must be in [1e-06, 1e+06], or 0", [](auto& p) { p.softcap = 1e-50; }},
      {"dropout_p is -0.5", [](auto& p) { p.dropout_p = -0.5f; }},
      {"must be in [0, 1 - 2^-17)", [](auto& p) { p.dropout_p = 1; }},
      {"must be in [0, 1 - 2^-17)", [](auto& p) { p.dropout_p = 0.999995f; }},
      {"must be in [0, 1 - 2^-17)", [](auto& p) { p.dropout_p = kNan; }},
      {"dropout_head is -1, must be in [0, 4294967295]", [](auto& p) { p.dropout_head = -1; }},
      {"bias_dtype is 5, must be in [1, 4]", [](auto& p) { p.bias = memory, p.bias_dtype = 5; }},
      {"bias_stride_h is 9, must be a multiple of 8 for a bias of bits",
       [](auto& p) { p.bias = memory, p.bias_dtype = ATTEND_BIT, p.bias_stride_h = 9; }},
  });
}

TEST(AttendCArguments, PagesAreCheckedBeforeTheyAreRead) {
  static const int32_t kPages[] = {0};
  ExpectRefused({
      {"kv_pages is NULL, but page_rows is 16", [](auto& p) { p.page_rows = 16; }},
      {"rows of a page are 24, must be a power of two",
       [](auto& p) { p.kv_pages = kPages, p.page_rows = 24; }},
      {"rows of a page", [](auto& p) { p.kv_pages = kPages, p.page_rows = 8; }},
      {"rows of a page", [](auto& p) { p.kv_pages = kPages, p.page_rows = -16; }},
      {"must not be packed",
       [](auto& p) {
         p.kv_pages = kPages, p.page_rows = 16, p.packed = 1, p.total_q = p.total_k = 1;
       }},
  });
}

TEST(AttendCArguments, ABatchsErrorNamesTheItem) {
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

TEST(AttendCArguments, ANullResultPointerIsRefused) {
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

TEST(AttendCArguments, MemoryFunctionsCheckTheirArgumentsFirst) {
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
  // CUDA's message, or that the build has no CUDA.
  const int32_t code = attend_malloc(1 << 20, 1, &data);
  EXPECT_TRUE(code == ATTEND_INTERNAL || code == ATTEND_UNIMPLEMENTED) << code;
  ExpectSays("cuda:1048576");
  EXPECT_EQ(attend_malloc(-2, 1, &data), ATTEND_INVALID_ARGUMENT);
  ExpectSays("device is -2, must be an ordinal of at least 0 or ATTEND_CPU, -1");
}

TEST(AttendCArguments, TheBackwardPasssArgumentsAreChecked) {
  static float lse = 0;
  static const int32_t kPages[] = {0};
  attend_backward_params good = {};
  good.struct_bytes = sizeof(good);
  good.attention = Good();
  good.attention.device = ATTEND_CPU;
  good.attention.lse = &lse;
  good.d_o = good.attention.o;
  struct {
    const char* words;
    void (*change)(attend_backward_params& params);
    int32_t code = ATTEND_INVALID_ARGUMENT;
  } const cases[] = {
      {"this library's attend_backward_params has",
       [](auto& p) { p.struct_bytes = sizeof(attend_params); }},
      {"struct_bytes is 8, this library's attend_params has",
       [](auto& p) { p.attention.struct_bytes = 8; }},
      {"lse is missing", [](auto& p) { p.attention.lse = nullptr; }},
      {"config is 0, must be in [-1, -1]", [](auto& p) { p.attention.config = 0; }},
      {"d_o is NULL, but has 8 elements", [](auto& p) { p.d_o.data = nullptr; }},
      {"d_q has strides 8, 0 and 8, by which it may overlap itself",
       [](auto& p) {
         p.attention.heads_q = 2, p.d_q = {memory, 8, 0, 8};
       }},
      {"d_q has strides 8, 7 and 8, by which it may overlap itself",
       [](auto& p) {
         p.attention.heads_q = 2, p.d_q = {memory, 8, 7, 8};
       }},
      {"d_bias is requested, but there is no bias", [](auto& p) { p.d_bias = memory; }},
      {"d_bias is requested, but the bias is a mask of bits",
       [](auto& p) { p.attention.bias = p.d_bias = memory, p.attention.bias_dtype = ATTEND_BIT; }},
      {"d_sinks are requested, but there are no sinks", [](auto& p) { p.d_sinks = memory; }},
      {"gradients of keys in pages",
       [](auto& p) {
         p.attention.page_rows = p.attention.len_k = 16, p.attention.kv_pages = kPages;
       },
       ATTEND_UNIMPLEMENTED},
      {"kernel cuda_flash_fp32 does not run on cpu",
       [](auto& p) { p.attention.kernel = "cuda_flash_fp32"; }, ATTEND_UNIMPLEMENTED},
  };
  EXPECT_EQ(attend_run_backward(nullptr, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("params is NULL");
  for (const auto& bad : cases) {
    SCOPED_TRACE(bad.words);
    attend_backward_params params = good;
    bad.change(params);
    EXPECT_EQ(attend_run_backward(&params, nullptr), bad.code);
    ExpectSays(bad.words);
  }
  EXPECT_EQ(attend_backward_workspace_bytes(&good, nullptr), ATTEND_INVALID_ARGUMENT);
  ExpectSays("bytes is NULL");
}

TEST(AttendCTree, IsExpandedToABiasOrRefused) {
  const uint8_t bits[] = {0b01, 0b11, 0b10, 0b00};  // two trees of two tokens
  const int64_t lengths[] = {2, 1};
  attend_params params = Good();
  params.batch = 2;
  params.len_q = 2;
  params.len_k = 9;
  const attend_tree good = {sizeof(attend_tree), bits, 2, 2, lengths};
  std::array<uint8_t, 8> out;
  ASSERT_EQ(attend_write_tree(&good, &params, out.data(), 8), ATTEND_OK) << attend_last_error();
  // Rows of nine keys; the first draft is keys 7 and 8, the second is key 8 for row 1.
  EXPECT_EQ(out[0], 0xff);
  EXPECT_EQ(out[1] & 1, 0);
  EXPECT_EQ(out[2], 0xff);
  EXPECT_EQ(out[3] & 1, 1);
  EXPECT_EQ(out[4], 0xff);
  EXPECT_EQ(out[5] & 1, 1);
  EXPECT_EQ(out[6], 0xff);
  EXPECT_EQ(out[7] & 1, 0);

  const auto refused = [&](const auto& spoil, const char* words, int64_t bytes = 8) {
    attend_tree tree = good;
    attend_params sizes = params;
    spoil(tree, sizes);
    EXPECT_EQ(attend_write_tree(&tree, &sizes, out.data(), bytes), ATTEND_INVALID_ARGUMENT);
    ExpectSays(words);
  };
  refused([](auto& tree, auto&) { tree.bits = nullptr; }, "tree.bits");
  refused([](auto& tree, auto&) { tree.struct_bytes = 8; }, "struct_bytes is 8");
  refused([](auto& tree, auto&) { tree.tokens = 1025; },
          "tree.tokens is 1025, must be in [1, 1024]");
  refused([](auto& tree, auto&) { tree.stride_b = 1; }, "tree.stride_b is 1, must be 0 or");
  refused([](auto& tree, auto&) { tree.stride_b = -2; }, "tree.stride_b is -2");
  refused([](auto&, auto& sizes) { sizes.len_q = -1; }, "len_q is -1");
  refused([](auto&, auto& sizes) { sizes.packed = 1; }, "needs q_offsets and kv_offsets");
  refused([](auto&, auto& sizes) { sizes.len_q = 1; }, "tree.lengths[0] is 2, must be in [0, 1]");
  refused([](auto&, auto&) {}, "bytes is 7, must be 8", 7);
  const int64_t beyond[] = {9, 10};
  refused([&](auto&, auto& sizes) { sizes.kv_lengths = beyond; },
          "keys of sequence 1 is 10, must be in [0, 9]");
  EXPECT_EQ(attend_write_tree(nullptr, &params, out.data(), 8), ATTEND_INVALID_ARGUMENT);
  EXPECT_EQ(attend_write_tree(&good, &params, nullptr, 8), ATTEND_INVALID_ARGUMENT);
  ExpectSays("bytes is 8 at NULL");
}

}  // namespace
}  // namespace attend::test
