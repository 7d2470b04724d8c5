// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cmath>

#include "client/load/schedule.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

TEST(Schedule, ConstantIntervalsAreEven) {
  Schedule schedule(Arrivals::kConstant, 300, 1);
  for (int i = 1; i <= 3000; ++i) {
    EXPECT_NEAR(static_cast<double>(schedule.NextNs()), i * (1e9 / 300), 2);
  }
}

TEST(Schedule, PoissonIntervalsAreExponential) {
  ATTEND_FRESH_SEED(seed);
  constexpr double kRate = 5000;
  constexpr int kCount = 200000;
  Schedule schedule(Arrivals::kPoisson, kRate, seed);
  double sum = 0, squares = 0;
  int above_mean = 0;
  int64_t before = 0;
  for (int i = 0; i < kCount; ++i) {
    const int64_t at = schedule.NextNs();
    ASSERT_GE(at, before);
    const double gap = static_cast<double>(at - before) * 1e-9 * kRate;  // mean 1
    before = at;
    sum += gap;
    squares += gap * gap;
    above_mean += gap > 1;
  }
  // Standard errors: mean 1/sqrt(n); second moment sqrt(20/n); share sqrt(p(1-p)/n). Six of each.
  const double n = kCount;
  EXPECT_NEAR(sum / n, 1.0, 6 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 2.0, 6 * std::sqrt(20 / n));
  EXPECT_NEAR(above_mean / n, std::exp(-1.0), 6 * std::sqrt(0.2326 / n));
}

TEST(Schedule, SeedsDetermineTheIntervals) {
  Schedule a(Arrivals::kPoisson, 100, 42), b(Arrivals::kPoisson, 100, 42),
      c(Arrivals::kPoisson, 100, 43);
  bool differs = false;
  for (int i = 0; i < 1000; ++i) {
    const int64_t at = a.NextNs();
    EXPECT_EQ(at, b.NextNs());
    differs = differs || at != c.NextNs();
  }
  EXPECT_TRUE(differs);
}

TEST(Schedule, CountsTheRemainingRequests) {
  Schedule counted(Arrivals::kPoisson, 1000, 3), drawn(Arrivals::kPoisson, 1000, 3);
  int64_t expected = 0;
  for (int64_t at = drawn.NextNs(); at < 2'000'000'000; at = drawn.NextNs()) {
    expected += at >= 500'000'000;
  }
  EXPECT_EQ(counted.CountWithin(500'000'000, 2'000'000'000), expected);
  Schedule many(Arrivals::kConstant, 1e7, 1);
  const double an_hour = 3600e9;
  EXPECT_NEAR(static_cast<double>(many.CountWithin(0, static_cast<int64_t>(an_hour))), 3.6e10, 1e3);
}

}  // namespace
}  // namespace attend::client
