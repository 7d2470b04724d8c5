// SPDX-License-Identifier: Apache-2.0

#include "client/call/merge_partial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "client/call/random.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

HostTensor Tensor(std::vector<int64_t> shape, const std::vector<float>& values) {
  HostTensor tensor = HostTensor::Make("test", DType::kFloat32, std::move(shape)).value();
  EXPECT_EQ(tensor.bytes, static_cast<int64_t>(values.size() * sizeof(float)));
  std::copy(values.begin(), values.end(), reinterpret_cast<float*>(tensor.data.get()));
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

TEST(MergePartialTest, NansArePropagated) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto merged = MergePartial(
      {Part({1, 1, 1, 1}, {1}, {1, 1, 1}, {0}), Part({1, 1, 1, 1}, {nan}, {1, 1, 1}, {nan})},
      v1::LAYOUT_BHLD);
  ASSERT_TRUE(merged.ok());
  EXPECT_TRUE(std::isnan(Values(merged->o)[0]));
  EXPECT_TRUE(std::isnan(Values(*merged->lse)[0]));
}

TEST(MergePartialTest, PartsMayHaveSomeRowsAndSinksCountOnce) {
  const AttentionResult first = Part({1, 1, 2, 1}, {1, 2}, {1, 1, 2}, {0, 0});
  const AttentionResult second = Part({1, 1, 1, 1}, {4}, {1, 1, 1}, {0});
  const auto merged =
      MergePartial({{&first, 0}, {&second, 1}}, 4, {std::log(2.0f)}, v1::LAYOUT_BHLD);
  ASSERT_TRUE(merged.ok()) << merged.status().ToString();
  // A sink weighs as much as two keys of score 0; rows 2 and 3 see nothing else.
  const std::vector<float> o = Values(merged->o), lse = Values(*merged->lse);
  EXPECT_FLOAT_EQ(o[0], 1.0f / 3);
  EXPECT_FLOAT_EQ(o[1], 6.0f / 4);
  EXPECT_EQ(o[2], 0);
  EXPECT_EQ(o[3], 0);
  EXPECT_FLOAT_EQ(lse[0], std::log(3.0f));
  EXPECT_FLOAT_EQ(lse[1], std::log(4.0f));
  EXPECT_FLOAT_EQ(lse[3], std::log(2.0f));
  EXPECT_THAT(MergePartial({{&first, 3}}, 4, {}, v1::LAYOUT_BHLD).status().message(),
              HasSubstr("parts[0] has 2 rows from row 3 on, but the whole has 4"));
  EXPECT_THAT(MergePartial({{&first, 0}}, 4, {1, 2}, v1::LAYOUT_BHLD).status().message(),
              HasSubstr("sinks has 2 entries"));
  EXPECT_FALSE(MergePartial({{&first, 0}}, 4, {}, v1::LAYOUT_LHD).ok());
}

// Each row has its own weight, so that swapped rows are detected.
TEST(MergePartialTest, FindsRowsInEveryLayout) {
  // LSE of h, l is 10 h + l; O of the first part is the same, that of the second 0, with equal
  // weight.
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

TEST(MergePartialTest, MismatchedPartsAreRefused) {
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

struct CutCase {
  const char* name;
  v1::Mask::Kind kind = v1::Mask::KIND_NONE;
  std::optional<int64_t> left = {}, right = {};
  bool alibi = false, sinks = false;
};

class MergePartialCutTest : public ::testing::TestWithParam<CutCase> {
 protected:
  static constexpr int64_t kRows = 9, kKeys = 12, kHeads = 2, kDim = 4;

  MergePartialCutTest() {
    for (std::vector<float>* const values : {&q_, &k_, &v_}) {
      values->resize(static_cast<size_t>((values == &q_ ? kRows : kKeys) * kHeads * kDim));
      for (float& value : *values) value = random_.AboutNormal();
    }
  }

  // BLHD: the rows of a part are contiguous.
  static TensorRef RowsOf(const std::vector<float>& values, int64_t begin, int64_t rows) {
    constexpr int64_t kRow = kHeads * kDim;
    return {DType::kFloat32,
            {1, rows, kHeads, kDim},
            values.data() + begin * kRow,
            rows * kRow * static_cast<int64_t>(sizeof(float))};
  }

  AttentionResult Answer(int64_t begin, int64_t end, bool sinks) const {
    AttentionCall call;
    call.layout = v1::LAYOUT_BLHD;
    call.q = RowsOf(q_, 0, kRows);
    call.k = RowsOf(k_, begin, end - begin);
    call.v = RowsOf(v_, begin, end - begin);
    call.mask = {GetParam().kind, GetParam().left, GetParam().right, begin, kKeys - end};
    if (GetParam().alibi) call.alibi_slopes = {0.5f, 0.125f};
    if (sinks) call.sinks = {0.5f, -1.0f};
    call.return_lse = call.o_float32 = true;
    AttentionResult answer;
    answer.o = HostTensor::Make("o", DType::kFloat32, AnswerShape(call)).value();
    answer.lse = HostTensor::Make("lse", DType::kFloat32, LseShape(call)).value();
    CpuReference(Describe(call, &answer.o, &*answer.lse).value());
    return answer;
  }

  const uint64_t seed_ = FreshSeed();
  Random random_{seed_};
  std::vector<float> q_, k_, v_;
};

TEST_P(MergePartialCutTest, AnyCutGivesTheUncutAnswer) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed_);
  const AttentionResult whole = Answer(0, kKeys, GetParam().sinks);
  for (int64_t cut = 0; cut <= kKeys; ++cut) {
    const int64_t second = cut + random_.Below(kKeys - cut + 1);
    const auto merged = MergePartial({Answer(0, cut, false), Answer(cut, second, GetParam().sinks),
                                      Answer(second, kKeys, false)},
                                     v1::LAYOUT_BLHD);
    ASSERT_TRUE(merged.ok()) << merged.status().ToString();
    for (const auto& [got, expected] : {std::pair{Values(merged->o), Values(whole.o)},
                                        std::pair{Values(*merged->lse), Values(*whole.lse)}}) {
      for (size_t i = 0; i < got.size(); ++i) {
        if (got[i] == expected[i]) continue;  // infinities too
        EXPECT_NEAR(got[i], expected[i], 2e-6) << "cut at " << cut << " and " << second;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Masks, MergePartialCutTest,
    ::testing::Values(CutCase{"AllKeys"}, CutCase{"Causal", v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT},
                      CutCase{"CausalTopLeft", v1::Mask::KIND_CAUSAL_TOP_LEFT},
                      CutCase{"Window", v1::Mask::KIND_WINDOW_BOTTOM_RIGHT, 3, 2},
                      CutCase{"WindowTopLeft", v1::Mask::KIND_WINDOW_TOP_LEFT, 2, 1},
                      CutCase{"Alibi", v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT, {}, {}, true},
                      CutCase{"AlibiTopLeft", v1::Mask::KIND_CAUSAL_TOP_LEFT, {}, {}, true},
                      CutCase{"Sinks", v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT, {}, {}, false, true},
                      CutCase{"All", v1::Mask::KIND_WINDOW_BOTTOM_RIGHT, 4, 1, true, true}),
    [](const auto& info) { return info.param.name; });

AttentionResult Gradients(GradientTensors gradients) {
  AttentionResult part;
  part.gradients = std::move(gradients);
  return part;
}

TEST(MergePartialGradientsTest, QueryGradientsAreSummedAndKeyGradientsJoined) {
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
}

TEST(MergePartialGradientsTest, KeyGradientsAreJoinedInEveryLayout) {
  GradientTensors first, second;
  first.d_k = Tensor({1, 1, 2, 1}, {1, 2});
  second.d_k = Tensor({1, 2, 2, 1}, {3, 4, 5, 6});
  const auto merged = MergePartialGradients({Gradients(first), Gradients(second)}, v1::LAYOUT_BLHD);
  ASSERT_TRUE(merged.ok()) << merged.status().ToString();
  EXPECT_EQ(merged->d_k->shape, (std::vector<int64_t>{1, 3, 2, 1}));
  EXPECT_THAT(Values(*merged->d_k), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(MergePartialGradientsTest, MismatchedPartsAreRefused) {
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
  without.d_v = Tensor({1, 2, 1, 1}, {1, 2});
  EXPECT_THAT(why({Gradients(with), Gradients(without)}), HasSubstr("[1, 2, 1, 1]"));
  with.d_q = Tensor({1, 1, 1, 1}, {1});
  without.d_q = Tensor({1, 2, 1, 1}, {1, 2});
  EXPECT_THAT(why({Gradients(with), Gradients(without)}), HasSubstr("must have one"));
}

}  // namespace
}  // namespace attend::client
