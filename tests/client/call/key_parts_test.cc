// SPDX-License-Identifier: Apache-2.0

#include "client/call/key_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace attend::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// 0, 1, 2, ... in float32.
HostTensor Counted(std::vector<int64_t> shape) {
  HostTensor tensor = HostTensor::Make("test", DType::kFloat32, std::move(shape)).value();
  auto* const values = reinterpret_cast<float*>(tensor.data.get());
  std::iota(values, values + tensor.bytes / 4, 0.0f);
  return tensor;
}

std::vector<float> Values(const TensorRef& tensor) {
  const auto* const data = static_cast<const float*>(tensor.data);
  return {data, data + tensor.bytes / 4};
}

TEST(RangeOfTest, CutsAlongAnyDimension) {
  const HostTensor tensor = Counted({2, 3, 2});
  const auto range = [&](size_t dimension, int64_t begin, int64_t end) {
    return Values(RangeOf("t", tensor, dimension, begin, end).value());
  };
  EXPECT_THAT(range(0, 1, 2), ElementsAre(6, 7, 8, 9, 10, 11));
  EXPECT_THAT(range(1, 1, 3), ElementsAre(2, 3, 4, 5, 8, 9, 10, 11));
  EXPECT_THAT(range(2, 1, 2), ElementsAre(1, 3, 5, 7, 9, 11));
  EXPECT_THAT(RangeOf("t", tensor, 1, 2, 2)->shape, ElementsAre(2, 0, 2));
}

TEST(RangeOfTest, AWholeTensorWithAnOwnerIsNotCopied) {
  const HostTensor tensor = Counted({2, 3});
  EXPECT_EQ(RangeOf("t", tensor, 1, 0, 3)->data, tensor.data.get());
  const TensorRef borrowed(tensor.dtype, tensor.shape, tensor.data.get(), tensor.bytes);
  const TensorRef owned = RangeOf("t", borrowed, 1, 0, 3).value();
  EXPECT_NE(owned.data, tensor.data.get());
  EXPECT_NE(owned.owner, nullptr);
  EXPECT_EQ(Values(owned), Values(tensor));
}

TEST(RangeOfTest, RowsOfBitsAreCutAtBytes) {
  HostTensor bits = HostTensor::Make("bits", DType::kBit, {2, 20}).value();
  ASSERT_EQ(bits.bytes, 6);
  for (int i = 0; i < 6; ++i) bits.data[i] = static_cast<std::byte>(i);
  const TensorRef cut = RangeOf("bits", bits, 1, 8, 20).value();
  EXPECT_THAT(cut.shape, ElementsAre(2, 12));
  ASSERT_EQ(cut.bytes, 4);
  const auto* const data = static_cast<const uint8_t*>(cut.data);
  EXPECT_THAT(std::vector<uint8_t>(data, data + 4), ElementsAre(1, 2, 4, 5));
  EXPECT_THAT(RangeOf("bits", bits, 1, 4, 20).status().message(), HasSubstr("cut at bit 4"));
}

TEST(RangeOfTest, RangesBeyondTheTensorAreRefused) {
  const HostTensor tensor = Counted({2, 3});
  for (const auto& [dimension, begin, end] :
       {std::tuple{size_t{1}, 0, 4}, {size_t{1}, -1, 2}, {size_t{1}, 2, 1}, {size_t{2}, 0, 1}}) {
    EXPECT_THAT(RangeOf("t", tensor, dimension, begin, end).status().message(),
                HasSubstr("t has the shape [2, 3]"));
  }
}

std::vector<MaskOption> Masks() {
  std::vector<MaskOption> masks(1);
  for (const auto kind : {v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT, v1::Mask::KIND_CAUSAL_TOP_LEFT}) {
    masks.push_back({kind, {}, {}});
    masks.push_back({kind, 3, {}});
  }
  for (const auto kind : {v1::Mask::KIND_WINDOW_BOTTOM_RIGHT, v1::Mask::KIND_WINDOW_TOP_LEFT}) {
    for (const int64_t left : {int64_t{-1}, int64_t{0}, int64_t{2}, INT64_MAX}) {
      for (const int64_t right : {int64_t{-1}, int64_t{0}, int64_t{4}, INT64_MAX}) {
        masks.push_back({kind, left, right});
      }
    }
  }
  return masks;
}

// The keys of the whole sequence that row i of the call sees, as kernels count them.
KeyRange Seen(const MaskOption& mask, int64_t rows, int64_t len_k, int64_t i) {
  Attention a;
  a.problem.len_q = rows;
  a.problem.len_k = len_k;
  a.problem.mask = MaskOf(mask);
  a.problem.key_offset = mask.key_offset;
  a.problem.keys_after = mask.keys_after;
  KeyRange range = VisibleKeys(a.problem.mask, SequenceOf(a, 0), i);
  range.begin = std::max<int64_t>(range.begin, 0);
  return range;
}

// For every part of small calls: its rows are exactly those that see its keys, and see the same
// ones as in the whole.
TEST(KeyPartsTest, PartsSeeTheSameKeysAsTheWhole) {
  for (const MaskOption& mask : Masks()) {
    for (const auto& [rows, keys] : {std::pair<int64_t, int64_t>{1, 9}, {4, 9}, {9, 9}, {11, 5}}) {
      AttentionCall call;
      call.mask = mask;
      call.q = Counted({1, 1, rows, 1});
      call.k = call.v = Counted({1, 1, keys, 1});
      for (int64_t begin = 0; begin < keys; ++begin) {
        for (int64_t end = begin + 1; end <= keys; ++end) {
          const RowRange seeing = RowsThatSee(MaskOf(mask), rows, keys, begin, end);
          for (int64_t i = 0; i < rows; ++i) {
            const KeyRange whole = Seen(mask, rows, keys, i);
            const bool sees = std::max(whole.begin, begin) < std::min(whole.end, end);
            const bool kept = i >= seeing.begin && i < seeing.end;
            ASSERT_EQ(sees, kept) << "row " << i << " keys " << begin << " to " << end;
          }
          if (seeing.size() == 0) continue;
          const AttentionCall part = PartOf(call, keys, {begin, begin, end}, seeing).value();
          ASSERT_GE(part.mask.key_offset, 0);
          ASSERT_GE(part.mask.keys_after, 0);
          ASSERT_EQ(part.q.shape[2], seeing.size());
          EXPECT_EQ(Values(part.k).front(), begin);
          for (int64_t i = seeing.begin; i < seeing.end; ++i) {
            const KeyRange whole = Seen(mask, rows, keys, i);
            const KeyRange own = Seen(part.mask, seeing.size(), end - begin, i - seeing.begin);
            ASSERT_EQ(std::max(whole.begin, begin) - begin, own.begin);
            ASSERT_EQ(std::min(whole.end, end) - begin, own.end);
          }
        }
      }
    }
  }
}

TEST(KeyPartsTest, APartAppendsOnlyItsRowsAndMayHaveNone) {
  AttentionCall call;
  call.layout = v1::LAYOUT_BLHD;
  call.q = Counted({1, 2, 3, 1});
  call.k = Counted({1, 4, 1, 1});  // keys 6 to 9 of 10
  call.v = Counted({1, 4, 1, 2});
  call.bias = Counted({1, 1, 1, 10});
  call.sinks = {1, 2, 3};
  const AttentionCall part = PartOf(call, 10, {4, 7, 9}, {0, 2}).value();
  EXPECT_THAT(Values(part.k), ElementsAre(1, 2));
  EXPECT_THAT(Values(part.v), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(Values(*part.bias), ElementsAre(4, 5, 6, 7, 8));
  EXPECT_TRUE(part.sinks.empty());
  EXPECT_TRUE(part.o_float32 && part.return_lse);
  const AttentionCall none = PartOf(call, 10, {4, 9, 9}, {0, 2}).value();
  EXPECT_TRUE(none.k.shape.empty() && none.v.shape.empty());
  const AttentionCall appends = PartOf(call, 10, {4, 7, 9}, {}).value();
  EXPECT_THAT(appends.q.shape, ElementsAre(1, 0, 3, 1));
  EXPECT_FALSE(appends.bias);
}

}  // namespace
}  // namespace attend::client
