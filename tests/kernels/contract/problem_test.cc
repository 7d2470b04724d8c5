// SPDX-License-Identifier: Apache-2.0
//
// Check at every bound, and the mask's arithmetic against brute force.

#include "kernels/contract/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "kernels/contract/limits.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

Problem Good() { return test::MakeSpec(2, 8, 4, 16, 32, 64, 48).problem; }

struct Bound {
  const char* field;
  std::function<void(Problem*, int64_t)> set;
  int64_t low;
  int64_t high;
};

TEST(Check, AcceptsItsBoundsAndRefusesTheNextValue) {
  const Bound bounds[] = {
      {"batch B", [](Problem* p, int64_t v) { p->batch = v; }, 0, kBatchMax},
      {"query heads Hq", [](Problem* p, int64_t v) { p->heads_q = v, p->heads_kv = 1; }, 1,
       kHeadsMax},
      {"key/value heads Hkv",
       [](Problem* p, int64_t v) { p->heads_q = kHeadsMax, p->heads_kv = v; }, 1, kHeadsMax},
      {"query length Lq", [](Problem* p, int64_t v) { p->len_q = v; }, 0, kLengthMax},
      {"key length Lk", [](Problem* p, int64_t v) { p->len_k = v; }, 0, kLengthMax},
      {"head dim D", [](Problem* p, int64_t v) { p->dim = v; }, 1, kHeadDimMax},
      {"value head dim Dv", [](Problem* p, int64_t v) { p->dim_v = v; }, 1, kHeadDimMax},
      {"packed query rows", [](Problem* p, int64_t v) { p->packed = true, p->total_q = v; }, 0,
       kTotalTokensMax},
      {"packed key rows", [](Problem* p, int64_t v) { p->packed = true, p->total_k = v; }, 0,
       kTotalTokensMax},
      {"key offset", [](Problem* p, int64_t v) { p->len_k = 0, p->key_offset = v; }, 0, kLengthMax},
      {"keys after the part", [](Problem* p, int64_t v) { p->len_k = 0, p->keys_after = v; }, 0,
       kLengthMax},
  };
  for (const Bound& bound : bounds) {
    for (const int64_t value : {bound.low, bound.low + 1, bound.high}) {
      Problem p = Good();
      bound.set(&p, value);
      if (bound.field == std::string("key/value heads Hkv") && value == 2) p.heads_q = 2;
      EXPECT_TRUE(Check(p).ok()) << bound.field << " = " << value << ": " << Check(p).message();
    }
    for (const int64_t value : {bound.low - 1, bound.high + 1, int64_t{INT64_MIN}, INT64_MAX}) {
      Problem p = Good();
      bound.set(&p, value);
      const Status status = Check(p);
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << bound.field << " = " << value;
      EXPECT_NE(status.message().find(bound.field), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(std::to_string(value)), std::string::npos);
      EXPECT_NE(status.message().find(std::to_string(bound.high)), std::string::npos);
    }
  }
}

TEST(Check, QueryHeadsMustBeAMultipleOfKvHeads) {
  Problem p = Good();
  p.heads_q = 6;
  p.heads_kv = 4;
  EXPECT_EQ(Check(p).code(), Code::kInvalidArgument);
  EXPECT_NE(Check(p).message().find("6"), std::string::npos);
  EXPECT_NE(Check(p).message().find("4"), std::string::npos);
  p.heads_q = 8;
  EXPECT_TRUE(Check(p).ok());
  p.heads_q = 2;  // fewer query heads than KV heads
  EXPECT_EQ(Check(p).code(), Code::kInvalidArgument);
}

TEST(Check, ParametersMustBeFiniteAndInRange) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float scale : {kNan, kInfinity, -kInfinity}) {
    Problem p = Good();
    p.scale = scale;
    EXPECT_EQ(Check(p).code(), Code::kInvalidArgument) << scale;
  }
  for (const float scale : {0.0f, -1.0f, 3e38f}) {
    Problem p = Good();
    p.scale = scale;
    EXPECT_TRUE(Check(p).ok()) << scale;
  }
  for (const float cap :
       {kNan, kInfinity, -1.0f, 0x1p-149f, 0.999f * kSoftcapMin, 1.001f * kSoftcapMax}) {
    Problem p = Good();
    p.softcap = cap;
    EXPECT_EQ(Check(p).code(), Code::kInvalidArgument) << cap;
  }
  for (const float cap : {0.0f, kSoftcapMin, kSoftcapMax}) {
    Problem p = Good();
    p.softcap = cap;
    EXPECT_TRUE(Check(p).ok()) << cap;
  }
}

TEST(Check, WindowSidesAreAtLeastMinusOne) {
  for (const int64_t side : {int64_t{-2}, int64_t{INT64_MIN}}) {
    Problem p = Good();
    p.mask.left = side;
    EXPECT_EQ(Check(p).code(), Code::kInvalidArgument);
    p = Good();
    p.mask.right = side;
    EXPECT_EQ(Check(p).code(), Code::kInvalidArgument);
  }
  for (const int64_t side : {int64_t{-1}, int64_t{0}, int64_t{INT64_MAX}}) {
    Problem p = Good();
    p.mask = {Alignment::kTopLeft, side, side};
    EXPECT_TRUE(Check(p).ok());
  }
}

TEST(Check, PagesMustBePowersOfTwoOfDenseKeys) {
  for (const int64_t rows : {16, 32, 64, 128, 256, 512, 1024}) {
    Problem p = Good();
    p.page_rows = rows;
    EXPECT_TRUE(Check(p).ok()) << rows;
    p.packed = true;
    EXPECT_NE(Check(p).message().find("must not be packed"), std::string::npos);
  }
  for (const int64_t rows : {int64_t{-16}, int64_t{1}, int64_t{8}, int64_t{15}, int64_t{17},
                             int64_t{48}, int64_t{1023}, int64_t{2048}, INT64_MAX, INT64_MIN}) {
    Problem p = Good();
    p.page_rows = rows;
    const Status status = Check(p);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << rows;
    EXPECT_NE(status.message().find("rows of a page"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(std::to_string(rows)), std::string::npos) << status.message();
  }
}

TEST(Check, APartMustBeWithinABoundedSequence) {
  Problem p = Good();
  p.len_k = kLengthMax / 2;
  p.key_offset = kLengthMax / 4;
  p.keys_after = kLengthMax / 4;
  EXPECT_TRUE(Check(p).ok()) << Check(p).message();
  ++p.keys_after;
  EXPECT_NE(Check(p).message().find("keys of the whole"), std::string::npos) << Check(p).message();
}

// As many as allowed, and more elements than 32 bits can count.
TEST(Check, AcceptsManySequencesAndElements) {
  Problem p = Good();
  p.batch = kBatchMax;
  p.heads_q = p.heads_kv = 64;
  p.len_q = p.len_k = 1024;
  p.dim = p.dim_v = 128;
  EXPECT_TRUE(Check(p).ok()) << Check(p).message();
  EXPECT_EQ(ElementsQ(p), int64_t{1} << 43);
  EXPECT_EQ(ElementsK(p), int64_t{1} << 43);
  EXPECT_EQ(ElementsV(p), int64_t{1} << 43);
}

TEST(Check, ProductsThatOverflowAreRefused) {
  Problem p = Good();
  p.batch = kBatchMax;
  p.heads_q = p.heads_kv = kHeadsMax;
  p.len_q = kLengthMax;
  const Status status = Check(p);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("overflows"), std::string::npos) << status.message();
  p.batch = 0;  // nothing is allocated then
  EXPECT_TRUE(Check(p).ok());
}

TEST(CheckedProduct, IsExactUpToTheLastValue) {
  EXPECT_EQ(*CheckedProduct("n", 3, 5), 15);
  EXPECT_EQ(*CheckedProduct("n", 2, 3, 5, 7), 210);
  EXPECT_EQ(*CheckedProduct("n", INT64_MAX, 1), INT64_MAX);
  EXPECT_EQ(*CheckedProduct("n", 0, INT64_MAX, INT64_MAX), 0);
  EXPECT_FALSE(CheckedProduct("n", INT64_MAX, 2).ok());
  EXPECT_FALSE(CheckedProduct("n", int64_t{1} << 32, int64_t{1} << 31).ok());
  const Result<int64_t> negative = CheckedProduct("rows", 4, -1);
  ASSERT_FALSE(negative.ok());
  EXPECT_NE(negative.status().message().find("rows"), std::string::npos);
}

// The definition in problem.h, without the saturation.
bool Visible(const Mask& mask, const Sequence& s, int64_t i, int64_t j) {
  const int64_t distance = j - i - s.offset;
  return (mask.left < 0 || distance >= -mask.left) && (mask.right < 0 || distance <= mask.right);
}

TEST(Mask, RangesAndPairsMatchBruteForce) {
  constexpr int64_t kMost = 9;
  for (const Alignment alignment : {Alignment::kBottomRight, Alignment::kTopLeft}) {
    for (int64_t len_q = 0; len_q <= kMost; ++len_q) {
      for (int64_t len_k = 0; len_k <= kMost; ++len_k) {
        for (int64_t left = -1; left <= 2 * kMost + 1; ++left) {
          for (int64_t right = -1; right <= 2 * kMost + 1; ++right) {
            Attention a;
            a.problem = test::MakeSpec(1, 1, 1, len_q, len_k, 1, 1).problem;
            a.problem.mask = {alignment, left, right};
            const Sequence s = SequenceOf(a, 0);
            double pairs = 0;
            for (int64_t i = 0; i < len_q; ++i) {
              const KeyRange range = VisibleKeys(a.problem.mask, s, i);
              for (int64_t j = 0; j < len_k; ++j) {
                const bool visible = Visible(a.problem.mask, s, i, j);
                pairs += visible ? 1 : 0;
                ASSERT_EQ(j >= range.begin && j < range.end, visible)
                    << Describe(a.problem) << " i " << i << " j " << j;
              }
              if (range.begin < range.end) {
                ASSERT_GE(range.begin, 0);
                ASSERT_LE(range.end, len_k);
              }
            }
            ASSERT_EQ(VisiblePairs(a), pairs) << Describe(a.problem);
          }
        }
      }
    }
  }
}

TEST(Mask, HugeWindowsMeanNoBound) {
  Attention a;
  a.problem = test::MakeSpec(1, 1, 1, 7, 5, 1, 1).problem;
  for (const int64_t side : {int64_t{INT64_MAX}, INT64_MAX - 1, INT64_MAX - 7}) {
    a.problem.mask = {Alignment::kBottomRight, side, side};
    for (int64_t i = 0; i < 7; ++i) {
      const KeyRange range = VisibleKeys(a.problem.mask, SequenceOf(a, 0), i);
      EXPECT_EQ(range.begin, 0);
      EXPECT_EQ(range.end, 5);
    }
    EXPECT_EQ(VisiblePairs(a), 35);
  }
}

TEST(Sequences, AreFoundInDenseAndPackedProblems) {
  test::ProblemSpec spec = test::MakeSpec(2, 1, 1, 6, 9, 4, 4);
  spec.q_lengths = {4, 6};
  spec.kv_lengths = {9, 2};
  const test::OwnedAttention dense = test::MakeAttention(spec, 1);
  Sequence s = SequenceOf(dense.attention, 1);
  EXPECT_EQ(s.q_row, 0);
  EXPECT_EQ(s.k_row, 0);
  EXPECT_EQ(s.q_len, 6);
  EXPECT_EQ(s.k_len, 2);
  EXPECT_EQ(s.q_rows, 6);
  EXPECT_EQ(s.offset, -4);
  EXPECT_EQ(SequenceOf(dense.attention, 0).q_rows, 6);  // padding rows are written too

  spec.problem.packed = true;
  spec.problem.mask.alignment = Alignment::kTopLeft;
  const test::OwnedAttention packed = test::MakeAttention(spec, 1);
  s = SequenceOf(packed.attention, 1);
  EXPECT_EQ(s.q_row, 4);
  EXPECT_EQ(s.k_row, 9);
  EXPECT_EQ(s.q_rows, 6);
  EXPECT_EQ(s.offset, 0);
}

TEST(Flops, CountsVisiblePairsOfAllHeads) {
  test::ProblemSpec spec = test::MakeSpec(2, 6, 3, 4, 4, 8, 16);
  EXPECT_EQ(Flops(test::MakeAttention(spec, 1).attention), 2.0 * 24 * 6 * 32);
  spec.problem.mask.right = 0;
  EXPECT_EQ(Flops(test::MakeAttention(spec, 1).attention), 2.0 * 24 * 6 * 20);
}

TEST(Elements, FollowTheShape) {
  Problem p = Good();
  EXPECT_EQ(ElementsQ(p), 2 * 8 * 16 * 64);
  EXPECT_EQ(ElementsK(p), 2 * 4 * 32 * 64);
  EXPECT_EQ(ElementsV(p), 2 * 4 * 32 * 48);
  EXPECT_EQ(ElementsO(p), 2 * 8 * 16 * 48);
  EXPECT_EQ(ElementsLse(p), 2 * 8 * 16);
  p.packed = true;
  p.total_q = 20;
  p.total_k = 50;
  EXPECT_EQ(ElementsQ(p), 8 * 20 * 64);
  EXPECT_EQ(ElementsK(p), 4 * 50 * 64);
  EXPECT_EQ(ElementsLse(p), 8 * 20);
}

TEST(Describe, NamesTheFeaturesInUse) {
  Problem p = Good();
  EXPECT_EQ(Describe(p), "float32 B2 Hq8 Hkv4 Lq16 Lk32 D64 Dv48 lse");
  p.mask = {Alignment::kTopLeft, 3, 0};
  p.packed = p.has_bias = p.has_alibi = p.has_sinks = true;
  p.softcap = 1;
  EXPECT_EQ(Describe(p),
            "float32 B2 Hq8 Hkv4 Lq16 Lk32 D64 Dv48 packed mask-tl[3,0] softcap bias alibi sinks "
            "lse");
}

TEST(ScoreCap, BoundsScoresWithItsSlope) {
  for (const double x : {-40.0, -2.0, -0.5, 0.0, 1e-3, 3.0, 1000.0}) {
    const ScoreCap<double> cap{4};
    constexpr double kStep = 1e-5;
    const double slope = (cap.Apply(x + kStep) - cap.Apply(x - kStep)) / (2 * kStep);
    const double share = cap.Share(cap.Apply(x));
    EXPECT_NEAR(1 - share * share, slope, 1e-9) << x;  // kStep^2, and 2^-50 / kStep
    EXPECT_LE(std::abs(cap.Apply(x)), 4) << x;
    EXPECT_EQ(ScoreCap<double>{0}.Apply(x), x);
    EXPECT_EQ(ScoreCap<double>{0}.Share(x), 0);
  }
}

TEST(ScoreCap, OfRawProductsIsThatOfScores) {
  Problem p = Good();
  p.scale = 0.5f;
  EXPECT_EQ(ScoreUnit(p), 0.5f);
  EXPECT_EQ(CapFactor(p), 0.0f);
  p.softcap = 4;
  for (const float product : {-20.0f, 0.25f, 7.0f}) {
    EXPECT_FLOAT_EQ(ScoreUnit(p) * std::tanh(product * CapFactor(p)),
                    CapOf(p).Apply(product * p.scale));
  }
}

TEST(ScoreCap, IsExactOnlyInFloat64) {
  Problem p = Good();
  p.softcap = 0.1f;
  EXPECT_EQ(ExactCap(p).value, static_cast<double>(0.1f));
  p.softcap64 = 0.1;
  EXPECT_EQ(ExactCap(p).value, 0.1);
  p.softcap = 0;  // 1e-50, say
  EXPECT_FALSE(ExactCap(p).on());
}

TEST(Problem, EachScoreTermCounts) {
  EXPECT_FALSE(HasScoreTerms(Good()));
  for (const int term : {0, 1, 2}) {
    Problem p = Good();
    p.softcap = term == 0 ? 1.0f : 0.0f;
    p.has_bias = term == 1;
    p.has_alibi = term == 2;
    EXPECT_TRUE(HasScoreTerms(p)) << term;
  }
}

TEST(Problem, DefaultScaleIsRoundedOnce) {
  for (int64_t dim = 1; dim <= 256; ++dim) {
    const long double root = std::sqrt(static_cast<long double>(dim));
    EXPECT_EQ(DefaultScale(dim), static_cast<float>(1 / root)) << dim;
  }
}

}  // namespace
}  // namespace attend
