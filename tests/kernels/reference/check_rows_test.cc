// SPDX-License-Identifier: Apache-2.0
//
// The check of O and LSE: correct answers pass, planted faults fail, also in samples.

#include "kernels/reference/check_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "kernels/cpu/flash.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Flash(const OwnedAttention& owned) {
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch);
}

RowsReport CheckSample(const OwnedAttention& owned, double budget, uint64_t seed = 7) {
  return CheckRows(owned.attention, SampleRows(owned.attention, seed, budget));
}

class CheckRowsTest : public testing::TestWithParam<DType> {
 protected:
  // A correct answer to a problem of several tiles.
  OwnedAttention Answered() {
    OwnedAttention owned = MakeAttention(MakeSpec(2, 4, 2, 256, 160, 64, 64, GetParam()), seed_);
    Flash(owned);
    return owned;
  }

  const uint64_t seed_ = FreshSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    "ATTEND_TEST_SEED=" + std::to_string(seed_)};
};

INSTANTIATE_TEST_SUITE_P(DTypes, CheckRowsTest, testing::ValuesIn(kDTypes),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

TEST_P(CheckRowsTest, CorrectAnswersPass) {
  const OwnedAttention owned = Answered();
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_EQ(report.rows_checked, 2 * 4 * 256);
  EXPECT_EQ(report.rows_total, 2 * 4 * 256);
  EXPECT_GT(report.max_abs_error, 0);
  EXPECT_LE(report.max_abs_error, report.bound);
  EXPECT_LE(report.mean_abs_error, report.max_abs_error);
  EXPECT_GT(report.max_lse_error, 0);
  EXPECT_LE(report.max_lse_error, report.lse_bound);
  EXPECT_TRUE(report.detail.empty());
}

// With equal weights and V all 1, the answer may be two units in the last place off.
TEST(CheckRowsUnits, AnswersMayBeTwoUnitsOff) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 4, 8, 1, DType::kFloat16), 1);
  const Attention& a = owned.attention;
  for (int64_t n = 0; n < 8; ++n) StoreElement(const_cast<void*>(a.q.data), DType::kFloat16, n, 0);
  for (int64_t n = 0; n < 4; ++n) StoreElement(const_cast<void*>(a.v.data), DType::kFloat16, n, 1);
  CpuReference(a);  // LSE
  const auto passes = [&](int units) {
    StoreElement(a.o.data, DType::kFloat16, 0, 1.0f - static_cast<float>(units) * 0x1p-11f);
    return CheckAllRows(a).ok;
  };
  EXPECT_TRUE(passes(2));
  EXPECT_FALSE(passes(3));
}

TEST_P(CheckRowsTest, TheRoundedReferencePassesOnHardShapes) {
  for (const int64_t len_k : {0, 1, 2, 77}) {
    for (const int64_t dim : {1, 3, 64}) {
      for (const double magnitude : {0.0, 1.0, 1e4}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 33, len_k, dim, dim, GetParam());
        spec.problem.scale = 1;
        spec.magnitude_q = magnitude;
        for (const bool flash : {false, true}) {
          OwnedAttention owned = MakeAttention(spec, seed_);
          flash ? Flash(owned) : CpuReference(owned.attention);
          const RowsReport report = CheckAllRows(owned.attention);
          EXPECT_TRUE(report.ok) << Describe(spec) << " flash " << flash << ": " << report.detail;
        }
      }
    }
  }
}

TEST_P(CheckRowsTest, OneWrongTileFails) {
  OwnedAttention owned = Answered();
  // As after a race: a tile has another head's output.
  for (int64_t i = 128; i < 192; ++i) {
    std::memcpy(owned.O(1, 2, i, 0), owned.O(1, 0, i, 0),
                static_cast<size_t>(64 * DTypeBytes(GetParam())));
  }
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
  // A budget of two rows per tile of 64.
  const RowsReport sampled =
      CheckSample(owned, 2.0 * 2 * 4 * 4 * CheckWork(owned.attention.problem));
  EXPECT_FALSE(sampled.ok);
  EXPECT_NE(sampled.detail.find("sequence 1, head 2"), std::string::npos) << sampled.detail;
}

TEST_P(CheckRowsTest, OneUnwrittenRowFailsInTheSmallestSample) {
  OwnedAttention owned = Answered();
  for (int64_t d = 0; d < 64; ++d) Set(owned.attention, owned.O(1, 3, 201, d), kNan);
  const RowsReport report = CheckSample(owned, 1);
  EXPECT_EQ(report.rows_checked, 1);
  EXPECT_FALSE(report.ok);
  EXPECT_TRUE(std::isinf(report.max_abs_error));
  EXPECT_NE(report.detail.find("sequence 1, head 3, row 201"), std::string::npos) << report.detail;
}

TEST_P(CheckRowsTest, OneNanOrInfinityFailsInTheSmallestSample) {
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    OwnedAttention owned = Answered();
    Set(owned.attention, owned.O(0, 1, 99, 63), value);
    EXPECT_FALSE(CheckSample(owned, 1).ok) << value;
  }
  OwnedAttention owned = Answered();
  owned.attention.lse[owned.attention.lse_stride_h + 50] = kNan;
  EXPECT_FALSE(CheckSample(owned, 1).ok);
}

TEST_P(CheckRowsTest, AValueOutsideTheRangeOfVFailsInTheSmallestSample) {
  OwnedAttention owned = Answered();
  Set(owned.attention, owned.O(0, 0, 17, 5), 20.0f);  // V is normal: no column reaches it
  EXPECT_FALSE(CheckSample(owned, 1).ok);
}

TEST_P(CheckRowsTest, OneElementOffByAFewUlpsFails) {
  OwnedAttention owned = Answered();
  void* element = owned.O(0, 3, 100, 11);
  const double value = static_cast<double>(Get(owned.attention, element));
  // 24 ulps of the value; in fp32, where the scores' rounding outweighs that of O, 96 ulps of the
  // values in V.
  const double ulp = 2 * UnitRoundoff(GetParam());
  const double error =
      GetParam() == DType::kFloat32 ? 96 * ulp : 24 * ulp * std::max(std::abs(value), 0.05);
  Set(owned.attention, element, static_cast<float>(value + error));
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_FALSE(report.ok);
  EXPECT_NE(report.detail.find("o[11] of sequence 0, head 3, row 100"), std::string::npos)
      << report.detail;
}

TEST_P(CheckRowsTest, AWrongLseFails) {
  OwnedAttention owned = Answered();
  owned.attention.lse[3] += 1e-4f;
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_FALSE(report.ok);
  EXPECT_NE(report.detail.find("lse of sequence 0, head 0, row 3"), std::string::npos)
      << report.detail;
  EXPECT_GT(report.max_lse_error, report.lse_bound);
}

TEST_P(CheckRowsTest, SmallSystematicErrorsFail) {
  // Every row scaled as if eight keys of 160 were lost.
  OwnedAttention owned = Answered();
  for (int64_t i = 0; i < 256; ++i) {
    for (int64_t d = 0; d < 64; ++d) {
      void* element = owned.O(0, 0, i, d);
      Set(owned.attention, element, Get(owned.attention, element) * (1 + 8.0f / 160));
    }
  }
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

TEST_P(CheckRowsTest, BoundsFollowTheMagnitudeOfEachRow) {
  // An error that is small beside the huge values of sequence 0 still fails in sequence 1.
  OwnedAttention owned = MakeAttention(MakeSpec(2, 1, 1, 8, 16, 8, 8, GetParam()), seed_);
  for (int64_t j = 0; j < 16; ++j) {
    for (int64_t d = 0; d < 8; ++d) {
      void* element = owned.V(0, 0, j, d);
      Set(owned.attention, element, 1000 * Get(owned.attention, element));
    }
  }
  Flash(owned);
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  void* element = owned.O(1, 0, 4, 4);
  Set(owned.attention, element, Get(owned.attention, element) + 0.1f);
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

TEST_P(CheckRowsTest, PaddingMustBeExactlyZero) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 8, 8, 8, 8, GetParam());
  spec.q_lengths = {5};
  OwnedAttention owned = MakeAttention(spec, seed_);
  Flash(owned);
  ASSERT_TRUE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 6, 0), 0x1p-24f);
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 6, 0), 0);
  owned.attention.lse[6] = -1e30f;
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

TEST_P(CheckRowsTest, NanAndInfinityInVAreRequiredExactlyWhereTheyAreVisible) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 40, 40, 8, 8, GetParam());
  spec.problem.mask.right = 0;
  OwnedAttention owned = MakeAttention(spec, seed_);
  Set(owned.attention, owned.V(0, 0, 20, 3), kNan);
  Set(owned.attention, owned.V(0, 0, 25, 4), kInfinity);
  Flash(owned);
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_FALSE(std::isinf(report.max_abs_error));
  Set(owned.attention, owned.O(0, 0, 30, 3), 0.5f);  // must be NaN
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 30, 3), kNan);
  Set(owned.attention, owned.O(0, 0, 30, 4), -kInfinity);  // must be +Inf
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 30, 4), kInfinity);
  EXPECT_TRUE(CheckAllRows(owned.attention).ok);
  Set(owned.attention, owned.O(0, 0, 19, 3), kNan);  // key 20 is not visible here
  EXPECT_FALSE(CheckAllRows(owned.attention).ok);
}

TEST(CountRows, CountsTheRowsThatAreWritten) {
  ProblemSpec spec = MakeSpec(3, 4, 2, 10, 5, 8, 8);
  spec.q_lengths = {1, 0, 10};
  EXPECT_EQ(CountRows(MakeAttention(spec, 1).attention), 3 * 4 * 10);
  spec.kv_lengths = {1, 2, 3};
  spec.problem.packed = true;
  EXPECT_EQ(CountRows(MakeAttention(spec, 1).attention), 11 * 4);
}

TEST(PoisonOutput, PoisonedRowsFail) {
  const uint64_t seed = FreshSeed();
  OwnedAttention owned = MakeAttention(RandomSpec(seed), seed);
  Flash(owned);
  PoisonOutput(owned.attention);
  EXPECT_TRUE(owned.GuardsIntact());
  EXPECT_EQ(CheckAllRows(owned.attention).ok, CountRows(owned.attention) == 0);
}

using RowKey = std::tuple<int64_t, int64_t, int64_t>;

std::set<RowKey> AsSet(const std::vector<RowId>& rows) {
  std::set<RowKey> set;
  for (const RowId& row : rows) set.insert({row.b, row.h, row.i});
  return set;
}

TEST(SampleRows, TakesAllRowsWhenTheBudgetAllows) {
  ProblemSpec spec = MakeSpec(3, 4, 2, 10, 5, 8, 8);
  spec.q_lengths = {1, 0, 10};
  spec.kv_lengths = {5, 5, 0};
  spec.problem.packed = true;
  OwnedAttention owned = MakeAttention(spec, 1);
  Flash(owned);
  const std::vector<RowId> rows = SampleRows(owned.attention, 1, 1e9);
  EXPECT_EQ(rows.size(), 44u);
  EXPECT_EQ(AsSet(rows).size(), 44u);
}

TEST(SampleRows, StaysWithinTheBudgetAndTheProblem) {
  ProblemSpec spec = MakeSpec(4, 2, 1, 500, 64, 16, 16);
  spec.q_lengths = {500, 0, 3, 200};
  spec.kv_lengths = {64, 64, 64, 64};
  spec.problem.packed = true;
  OwnedAttention owned = MakeAttention(spec, 1);
  Flash(owned);
  for (const int64_t want : {1, 2, 10, 100, 1000}) {
    const std::vector<RowId> rows = SampleRows(
        owned.attention, 3, static_cast<double>(want) * CheckWork(owned.attention.problem));
    EXPECT_LE(static_cast<int64_t>(rows.size()), want);
    EXPECT_GE(static_cast<int64_t>(rows.size()), std::min<int64_t>(want, 1 + want / 2));
    EXPECT_EQ(AsSet(rows).size(), rows.size());  // no duplicates
    for (const RowId& row : rows) {
      EXPECT_LT(row.i, SequenceOf(owned.attention, row.b).q_rows);
      EXPECT_LT(row.h, 2);
    }
  }
}

TEST(SampleRows, IsDeterminedByTheSeed) {
  OwnedAttention owned = MakeAttention(MakeSpec(2, 2, 2, 300, 64, 16, 16), 1);
  Flash(owned);
  const double budget = 20 * CheckWork(owned.attention.problem);
  EXPECT_EQ(AsSet(SampleRows(owned.attention, 5, budget)),
            AsSet(SampleRows(owned.attention, 5, budget)));
  EXPECT_NE(AsSet(SampleRows(owned.attention, 5, budget)),
            AsSet(SampleRows(owned.attention, 6, budget)));
}

TEST(SampleRows, CoversTilesAndTheEndsOfSequences) {
  OwnedAttention owned = MakeAttention(MakeSpec(2, 3, 1, 256, 64, 16, 16), 1);
  Flash(owned);
  const std::vector<RowId> rows =
      SampleRows(owned.attention, 11, 26 * CheckWork(owned.attention.problem));  // 24 tiles + 2
  std::map<RowKey, int> tiles;
  bool first = false, last = false;
  for (const RowId& row : rows) {
    ++tiles[{row.b, row.h, row.i / 64}];
    first = first || row.i == 0;
    last = last || row.i == 255;
  }
  EXPECT_TRUE(first);
  EXPECT_TRUE(last);
  EXPECT_GE(tiles.size(), 22u);  // the first and the last row may displace two tiles
}

// The number of rows is bounded too, for problems with millions of cheap rows.
TEST(SampleRows, TheNumberOfCheapRowsIsBounded) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 3 * kSampledRowsMax, 0, 1, 1);
  const OwnedAttention owned = MakeAttention(spec, 1);
  CpuReference(owned.attention);
  const std::vector<RowId> rows = SampleRows(owned.attention, 1, 1e15);
  EXPECT_GE(static_cast<int64_t>(rows.size()), kSampledRowsMax - 2);
  EXPECT_LE(static_cast<int64_t>(rows.size()), kSampledRowsMax);
  EXPECT_EQ(AsSet(rows).size(), rows.size());
  // The cost of a row includes more than its multiply-adds.
  const Problem& p = owned.attention.problem;
  const double budget = 1e6;
  EXPECT_LE(static_cast<double>(SampleRows(owned.attention, 1, budget).size()),
            budget / CheckWork(p));
  EXPECT_GT(CheckWork(p), 100);
  spec = MakeSpec(1, 1, 1, 1, 1000, 1, 1);
  const double plain = CheckWork(spec.problem);
  EXPECT_GT(plain, 1000 * 10);
  spec.problem.softcap = 5;
  const double capped = CheckWork(spec.problem);
  EXPECT_GT(capped, plain + 1000 * 10);
  spec.problem.dropout = 1;
  EXPECT_GT(CheckWork(spec.problem), capped + 1000 * 10);
}

// With dropout, half of the rows exceed V's largest value, which is no reason to check them first.
TEST(SampleRows, RowsAboveVAreNotSuspiciousWithDropout) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 300, 40, 8, 1);
  spec.problem.dropout = 32768;
  OwnedAttention owned = MakeAttention(spec, 1);
  for (int64_t j = 0; j < 40; ++j) Set(owned.attention, owned.V(0, 0, j, 0), 1.0f);
  Flash(owned);
  Set(owned.attention, owned.O(0, 1, 250, 0), kNan);
  const double budget = 4 * CheckWork(owned.attention.problem);
  EXPECT_TRUE(AsSet(SampleRows(owned.attention, 1, budget)).contains(RowKey{0, 1, 250}));
  Set(owned.attention, owned.O(0, 1, 250, 0), 2.1f);
  EXPECT_TRUE(AsSet(SampleRows(owned.attention, 1, budget)).contains(RowKey{0, 1, 250}));
}

TEST(SampleRows, EmptyProblemsHaveNoRows) {
  EXPECT_TRUE(SampleRows(MakeAttention(MakeSpec(0, 1, 1, 4, 4, 8, 8), 1).attention, 1, 10).empty());
  EXPECT_TRUE(SampleRows(MakeAttention(MakeSpec(2, 1, 1, 0, 4, 8, 8), 1).attention, 1, 10).empty());
  const RowsReport report = CheckAllRows(MakeAttention(MakeSpec(2, 1, 1, 0, 4, 8, 8), 1).attention);
  EXPECT_TRUE(report.ok);
  EXPECT_EQ(report.rows_checked, 0);
}

}  // namespace
}  // namespace attend::test
