// SPDX-License-Identifier: Apache-2.0
//
// The merge algebra: identity, order, grouping, and the effect of NaN and Inf.

#include "kernels/contract/softmax_state.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A row of keys reduced to a state and a one-dimensional output.
struct Partial {
  SoftmaxState<double> state;
  double o = 0;
};

Partial Reduce(const std::vector<double>& scores, const std::vector<double>& values) {
  Partial partial;
  for (size_t n = 0; n < scores.size(); ++n) {
    const MergeWeights<double> w = Add(partial.state, scores[n]);
    partial.o = w.left * partial.o + w.right * values[n];
  }
  return partial;
}

Partial Merged(Partial left, const Partial& right) {
  const MergeWeights<double> w = Merge(left.state, right.state);
  left.o = w.left * left.o + w.right * right.o;
  return left;
}

double Output(const Partial& p) { return p.o * InverseSum(p.state); }

// Rounding in double over a few dozen merges.
constexpr double kTolerance = 64 * std::numeric_limits<double>::epsilon();

void ExpectSame(const Partial& a, const Partial& b) {
  EXPECT_NEAR(Output(a), Output(b), kTolerance * 10);
  EXPECT_NEAR(LogSumExp(a.state), LogSumExp(b.state), kTolerance * 100);
}

class Algebra : public testing::Test {
 protected:
  Partial Random(int keys) {
    std::normal_distribution<double> normal(0, 5);
    std::vector<double> scores, values;
    for (int n = 0; n < keys; ++n) {
      scores.push_back(normal(engine_));
      values.push_back(normal(engine_));
    }
    return Reduce(scores, values);
  }

  uint64_t seed_ = test::FreshSeed();
  std::mt19937_64 engine_{seed_};
};

TEST_F(Algebra, MatchesTheDefinition) {
  const std::vector<double> scores = {0.5, -2, 3, 1};
  const std::vector<double> values = {1, 2, -3, 4};
  double sum = 0, o = 0;
  for (size_t n = 0; n < scores.size(); ++n) {
    sum += std::exp(scores[n]);
    o += std::exp(scores[n]) * values[n];
  }
  const Partial p = Reduce(scores, values);
  EXPECT_NEAR(Output(p), o / sum, kTolerance);
  EXPECT_NEAR(LogSumExp(p.state), std::log(sum), kTolerance);
}

TEST_F(Algebra, EmptyIsTheIdentityExactly) {
  SCOPED_TRACE(seed_);
  for (int n = 0; n < 100; ++n) {
    const Partial p = Random(1 + n % 7);
    for (const Partial& merged : {Merged(p, Partial()), Merged(Partial(), p)}) {
      EXPECT_EQ(merged.state.max, p.state.max);
      EXPECT_EQ(merged.state.sum, p.state.sum);
      EXPECT_EQ(merged.o, p.o);
    }
  }
}

TEST_F(Algebra, MergingTwoEmptyStatesStaysEmpty) {
  const Partial p = Merged(Partial(), Partial());
  EXPECT_EQ(p.state.max, -kInfinity);
  EXPECT_EQ(p.state.sum, 0);
  EXPECT_EQ(p.o, 0);
  EXPECT_EQ(InverseSum(p.state), 0);
  EXPECT_EQ(LogSumExp(p.state), -kInfinity);
}

TEST_F(Algebra, IsCommutativeAndAssociative) {
  SCOPED_TRACE(seed_);
  for (int n = 0; n < 200; ++n) {
    const Partial a = Random(n % 5), b = Random(1 + n % 3), c = Random(n % 4);
    ExpectSame(Merged(a, b), Merged(b, a));
    ExpectSame(Merged(Merged(a, b), c), Merged(a, Merged(b, c)));
  }
}

TEST_F(Algebra, ScoresFarApartDoNotOverflow) {
  const Partial p = Reduce({-1e30, 1e30, 0}, {1, 2, 3});
  EXPECT_EQ(Output(p), 2);
  EXPECT_EQ(LogSumExp(p.state), 1e30);
}

TEST_F(Algebra, MinusInfinityHasNoWeight) {
  const Partial with = Reduce({1, -kInfinity, 2}, {1, 100, 2});
  const Partial without = Reduce({1, 2}, {1, 2});
  EXPECT_EQ(Output(with), Output(without));
  const Partial nothing = Reduce({-kInfinity, -kInfinity}, {1, 2});
  EXPECT_EQ(nothing.state.sum, 0);
  EXPECT_EQ(Output(nothing), 0);
}

TEST_F(Algebra, NanAndInfinityReachTheOutput) {
  for (const std::vector<double>& scores :
       {std::vector<double>{1, kNan, 2}, {kNan, 1, 2}, {1, 2, kNan}, {1, kInfinity, 2}}) {
    EXPECT_TRUE(std::isnan(Output(Reduce(scores, {1, 2, 3}))));
  }
  const Partial good = Reduce({1}, {1});
  const Partial bad = Reduce({kNan}, {1});
  EXPECT_TRUE(std::isnan(Output(Merged(good, bad))));
  EXPECT_TRUE(std::isnan(Output(Merged(bad, good))));
  EXPECT_TRUE(std::isnan(LogSumExp(Merged(good, bad).state)));
}

TEST_F(Algebra, ASinkJoinsOnlyTheDenominator) {
  Partial p = Reduce({0.5, 1}, {3, 4});
  const double before = Output(p);
  p.o *= AddSink(p.state, 2.0);
  const double sum = std::exp(0.5) + std::exp(1.0);
  EXPECT_NEAR(Output(p), before * sum / (sum + std::exp(2.0)), kTolerance * 10);
  EXPECT_NEAR(LogSumExp(p.state), std::log(sum + std::exp(2.0)), kTolerance * 10);

  Partial empty;
  empty.o *= AddSink(empty.state, 1.5);
  EXPECT_EQ(Output(empty), 0);
  EXPECT_EQ(LogSumExp(empty.state), 1.5);
  Partial none = Reduce({1}, {2});
  none.o *= AddSink(none.state, -kInfinity);
  EXPECT_EQ(Output(none), 2);
}

TEST_F(Algebra, FloatBehavesLikeDouble) {
  SoftmaxState<float> state;
  EXPECT_EQ(InverseSum(state), 0.0f);
  EXPECT_EQ(LogSumExp(state), -std::numeric_limits<float>::infinity());
  const MergeWeights<float> w = Add(state, 3.0f);
  EXPECT_EQ(w.left, 0.0f);
  EXPECT_EQ(w.right, 1.0f);
  EXPECT_EQ(LogSumExp(state), 3.0f);
}

}  // namespace
}  // namespace attend
