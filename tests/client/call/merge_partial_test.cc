// SPDX-License-Identifier: Apache-2.0

#include "client/call/merge_partial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace attend::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

HostTensor Tensor(std::vector<int64_t> shape, const std::vector<float>& values) {
  HostTensor tensor = HostTensor::Make("test", DType::kFloat32, std::move(shape)).value();
  EXPECT_EQ(tensor.bytes, static_cast<int64_t>(values.size() * sizeof(float)));
  std::memcpy(tensor.data.get(), values.data(), values.size() * sizeof(float));
  return tensor;
}

std::vector<float> Values(const HostTensor& tensor) {
  const auto* const data = reinterpret_cast<const float*>(tensor.data.get());
  return {data, data + tensor.bytes / sizeof(float)};
}

AttentionResult Part(std::vector<int64_t> o_shape, const std::vector<float>& o,
                     std::vector<int64_t> lse_shape, const std::vector<float>& lse) {
  AttentionResult part;
  part.o = Tensor(std::move(o_shape), o);
  part.lse = Tensor(std::move(lse_shape), lse);
  return part;
}

TEST(MergePartialTest, WeighsRowsByTheirKeys) {
  // Three keys of score 0 against one of score log 2.
  const std::vector<AttentionResult> parts = {
      Part({1, 1, 1, 2}, {1, 10}, {1, 1, 1}, {std::log(3.0f)}),
      Part({1, 1, 1, 2}, {6, 0}, {1, 1, 1}, {std::log(2.0f)})};
  const Result<AttentionResult> merged = MergePartial(parts, v1::LAYOUT_BHLD);
  ASSERT_TRUE(merged.ok()) << merged.status().ToString();
  EXPECT_THAT(Values(merged->o), ElementsAre(3, 6));
  EXPECT_FLOAT_EQ(Values(*merged->lse)[0], std::log(5.0f));
}

TEST(MergePartialTest, APartWithoutKeysChangesNothing) {
  const AttentionResult nothing = Part({1, 1, 2, 1}, {0, 0}, {1, 1, 2}, {-kInf, -kInf});
  const AttentionResult some = Part({1, 1, 2, 1}, {7, 0}, {1, 1, 2}, {88.0f, -kInf});
  const auto merged = MergePartial({nothing, some, nothing}, v1::LAYOUT_BHLD);
  ASSERT_TRUE(merged.ok());
  EXPECT_THAT(Values(merged->o), ElementsAre(7, 0));
  EXPECT_THAT(Values(*merged->lse), ElementsAre(88.0f, -kInf));
}

TEST(MergePartialTest, NanStays) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto merged = MergePartial(
      {Part({1, 1, 1, 1}, {1}, {1, 1, 1}, {0}), Part({1, 1, 1, 1}, {nan}, {1, 1, 1}, {nan})},
      v1::LAYOUT_BHLD);
  ASSERT_TRUE(merged.ok());
  EXPECT_TRUE(std::isnan(Values(merged->o)[0]));
  EXPECT_TRUE(std::isnan(Values(*merged->lse)[0]));
}

// Each row's own weight, so that a row that is mistaken for another shows.
TEST(MergePartialTest, FindsRowsInEveryLayout) {
  // LSE of h, l is 10 h + l; O of the first part is that, of the second 0, weighed alike.
  const std::vector<float> lse = {0, 1, 2, 10, 11, 12};
  const std::vector<float> by_length = {0, 10, 1, 11, 2, 12};
  const std::vector<float> zeros(6);
  const auto merged = [&](v1::Layout layout, std::vector<int64_t> o_shape,
                          std::vector<int64_t> lse_shape, const std::vector<float>& o) {
    const auto result = MergePartial(
        {Part(o_shape, o, lse_shape, lse), Part(o_shape, zeros, lse_shape, lse)}, layout);
    EXPECT_TRUE(result.ok()) << result.status().ToString();
    return Values(result->o);
  };
  EXPECT_THAT(merged(v1::LAYOUT_BHLD, {1, 2, 3, 1}, {1, 2, 3}, lse),
              ElementsAre(0, .5, 1, 5, 5.5, 6));
  EXPECT_THAT(merged(v1::LAYOUT_BLHD, {1, 3, 2, 1}, {1, 2, 3}, by_length),
              ElementsAre(0, 5, .5, 5.5, 1, 6));
  EXPECT_THAT(merged(v1::LAYOUT_LHD, {3, 2, 1}, {2, 3}, by_length),
              ElementsAre(0, 5, .5, 5.5, 1, 6));
}

TEST(MergePartialTest, WhatDoesNotFitIsRefused) {
  const AttentionResult part = Part({1, 1, 1, 1}, {1}, {1, 1, 1}, {0});
  const auto why = [](const std::vector<AttentionResult>& parts,
                      v1::Layout layout = v1::LAYOUT_BHLD) {
    const Result<AttentionResult> merged = MergePartial(parts, layout);
    EXPECT_EQ(merged.status().code(), Code::kInvalidArgument);
    return merged.status().message();
  };
  EXPECT_THAT(why({}), HasSubstr("0 entries"));
  AttentionResult other = part;
  other.lse.reset();
  EXPECT_THAT(why({part, other}), HasSubstr("parts[1] has no lse"));
  other = part;
  other.o.dtype = DType::kFloat16;
  EXPECT_THAT(why({other}), HasSubstr("an o of float16, must be float32"));
  EXPECT_THAT(why({part, Part({1, 1, 2, 1}, {1, 1}, {1, 1, 2}, {0, 0})}),
              HasSubstr("[1, 1, 2, 1]"));
  EXPECT_THAT(why({part}, v1::LAYOUT_LHD), HasSubstr("which the layout does not have"));
  EXPECT_THAT(why({Part({1, 2, 1, 1}, {1, 1}, {1, 1, 2}, {0, 0})}), HasSubstr("must be"));
}

AttentionResult Gradients(GradientTensors gradients) {
  AttentionResult part;
  part.gradients = std::move(gradients);
  return part;
}

TEST(MergePartialGradientsTest, SumsAndJoins) {
  GradientTensors first, second;
  first.d_q = Tensor({1, 1, 1, 2}, {1, 2});
  second.d_q = Tensor({1, 1, 1, 2}, {10, 20});
  first.d_k = Tensor({1, 2, 1, 1}, {1, 2});
  second.d_k = Tensor({1, 2, 2, 1}, {3, 4, 5, 6});
  first.d_bias = Tensor({1, 1, 2, 0}, {});
  second.d_bias = Tensor({1, 1, 2, 1}, {7, 8});
  second.d_sinks = Tensor({1}, {9});
  const auto merged = MergePartialGradients({Gradients(first), Gradients(second)}, v1::LAYOUT_BHLD);
  ASSERT_TRUE(merged.ok()) << merged.status().ToString();
  EXPECT_THAT(Values(*merged->d_q), ElementsAre(11, 22));
  EXPECT_EQ(merged->d_k->shape, (std::vector<int64_t>{1, 2, 3, 1}));
  EXPECT_THAT(Values(*merged->d_k), ElementsAre(1, 3, 4, 2, 5, 6));
  EXPECT_THAT(Values(*merged->d_bias), ElementsAre(7, 8));
  EXPECT_THAT(Values(*merged->d_sinks), ElementsAre(9));
  EXPECT_FALSE(merged->d_v);
  first.d_k = Tensor({1, 1, 2, 1}, {1, 2});
  second.d_k = Tensor({1, 2, 2, 1}, {3, 4, 5, 6});
  first.d_bias.reset();
  second.d_bias.reset();
  const auto rows_first =
      MergePartialGradients({Gradients(first), Gradients(second)}, v1::LAYOUT_BLHD);
  EXPECT_EQ(rows_first.status().code(), Code::kInvalidArgument) << "they differ in Hkv";
}

TEST(MergePartialGradientsTest, WhatDoesNotFitIsRefused) {
  const auto why = [](const std::vector<AttentionResult>& parts,
                      v1::Layout layout = v1::LAYOUT_BHLD) {
    return std::string(MergePartialGradients(parts, layout).status().message());
  };
  EXPECT_THAT(why({}), HasSubstr("0 entries"));
  EXPECT_THAT(why({AttentionResult()}), HasSubstr("parts[0] has no gradients"));
  GradientTensors with, without;
  with.d_v = Tensor({1, 1, 1, 1}, {1});
  EXPECT_THAT(why({Gradients(with), Gradients(without)}), HasSubstr("parts[1] has no d_v"));
  EXPECT_THAT(why({Gradients(with)}, v1::LAYOUT_LHD), HasSubstr("LHD"));
}

}  // namespace
}  // namespace attend::client
