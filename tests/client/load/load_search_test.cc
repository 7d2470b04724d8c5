// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/load/load_search.h"

namespace attend::client {
namespace {

TEST(RateSearch, FindsTheLimitFromBelowAndFromAbove) {
  for (const double start : {1.0, 100.0, 50000.0}) {
    const double limit = 1234;
    RateSearch search(start, 0.02, 0.01);
    int steps = 0;
    for (; !search.done() && steps < 100; ++steps) search.Add(search.rate() <= limit);
    EXPECT_LE(search.best(), limit);
    EXPECT_GE(search.best(), limit / 1.02);
    EXPECT_LT(steps, 40);
    EXPECT_THAT(DescribeFound(search.Found(5)), ::testing::HasSubstr("highest rate"));
  }
}

TEST(RateSearch, EndsIfNoRateMeetsTheBound) {
  RateSearch search(100, 0.05, 1);
  int steps = 0;
  for (; !search.done() && steps < 100; ++steps) search.Add(false);
  EXPECT_EQ(steps, 7) << "100, 50, ... 1.5625, and none below 1";
  EXPECT_EQ(search.best(), 0);
  EXPECT_THAT(DescribeFound(search.Found(5)),
              ::testing::HasSubstr("no rate measured has p99 <= 5 ms; the lowest, 1.562/s"));
}

TEST(RateSearch, RatesAreWrittenWithoutExponents) {
  EXPECT_EQ(RateText(20000), "20000");
  EXPECT_EQ(RateText(1e7), "10000000");
  EXPECT_EQ(RateText(70.710678), "70.71");
  EXPECT_EQ(RateText(0.001), "0.001");
}

}  // namespace
}  // namespace attend::client
