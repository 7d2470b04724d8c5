// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "client/plot/axis.h"

namespace attend::client {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

TEST(Axis, LinearBeginsAtZeroAndHasRoundTicks) {
  Axis axis({3, 87}, false);
  axis.Place(100, 200);
  EXPECT_DOUBLE_EQ(axis.At(0), 100);
  EXPECT_LT(axis.At(87), 200);
  EXPECT_GT(axis.At(87), 190);
  EXPECT_THAT(axis.Ticks(5), ElementsAre(0, 20, 40, 60, 80));
  EXPECT_THAT(
      Axis({0.7}, false).Ticks(4),
      ElementsAre(0, DoubleNear(0.2, 1e-12), DoubleNear(0.4, 1e-12), DoubleNear(0.6, 1e-12)));
}

TEST(Axis, LogarithmicHasEqualStepsForEqualRatios) {
  Axis axis({1, 1000}, true);
  axis.Place(0, 300);
  EXPECT_NEAR(axis.At(10) - axis.At(1), axis.At(1000) - axis.At(100), 1e-9);
  EXPECT_GT(axis.At(1), 0);
  EXPECT_LT(axis.At(1000), 300);
  EXPECT_THAT(axis.Ticks(4), ElementsAre(1, 10, DoubleNear(100, 1e-9), DoubleNear(1000, 1e-9)));
}

TEST(Axis, EverySpanHasAtLeastAFewTicks) {
  for (double low = 1e-6; low < 1e9; low *= 3.7) {
    for (double span = 1; span < 1e12; span *= 2.3) {
      for (const bool logarithmic : {false, true}) {
        const Axis axis({low, low * span}, logarithmic);
        const std::vector<double> ticks = axis.Ticks(5);
        EXPECT_GE(ticks.size(), 2u) << low << " " << span << " " << logarithmic;
        EXPECT_LE(ticks.size(), 10u) << low << " " << span << " " << logarithmic;
        for (const double tick : ticks) {
          EXPECT_GE(tick, axis.low());
          EXPECT_LE(tick, axis.high());
        }
      }
    }
  }
}

TEST(Axis, UnplottableValuesAreOmitted) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinite = std::numeric_limits<double>::infinity();
  const Axis axis({nan, 0, -1, infinite, 4, 8}, true);
  EXPECT_GT(axis.low(), 1);
  EXPECT_LT(axis.high(), 16);
  for (const double value : {nan, 0.0, -1.0, infinite}) EXPECT_FALSE(axis.Shows(value));
  for (const bool logarithmic : {false, true}) {
    const Axis empty({nan}, logarithmic);
    EXPECT_LT(empty.low(), empty.high());
    EXPECT_GE(empty.Ticks(5).size(), 2u);
  }
}

TEST(Axis, TickLabelsAreShort) {
  EXPECT_EQ(TickText(0), "0");
  EXPECT_EQ(TickText(0.25), "0.25");
  EXPECT_EQ(TickText(1500), "1.5k");
  EXPECT_EQ(TickText(2e6), "2M");
}

}  // namespace
}  // namespace attend::client
