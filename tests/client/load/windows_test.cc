// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "client/load/windows.h"

namespace attend::client {
namespace {

using ::testing::DoubleNear;

constexpr int64_t kSecond = 1'000'000'000;

WindowResult Window(int64_t ok, int64_t latency_ns) {
  WindowResult window;
  window.elapsed_s = 1;
  window.ok = ok;
  for (int64_t i = 0; i < ok; ++i) window.latency.Record(latency_ns);
  return window;
}

// Windows of one second from second 100 on, ended by a manual clock. Returns how many were needed.
int64_t Measure(WindowPlan& plan, const std::vector<WindowResult>& windows) {
  size_t given = 0;
  for (int64_t now = 100 * kSecond; now <= 200 * kSecond && !plan.done(); now += kSecond / 4) {
    const std::optional<int64_t> ended = plan.Ended(now);
    if (!ended) continue;
    EXPECT_EQ(*ended, static_cast<int64_t>(given));
    EXPECT_EQ(now, plan.BeginOf(*ended + 1)) << "as soon as it is over";
    plan.Add(windows.at(std::min(given++, windows.size() - 1)));
  }
  EXPECT_FALSE(plan.Ended(1000 * kSecond)) << "nothing is asked for after the end";
  return static_cast<int64_t>(plan.windows().size());
}

TEST(Windows, ThreeAgreeingWindowsSuffice) {
  WindowPlan plan(100 * kSecond, kSecond, 5, StabilityRule{});
  EXPECT_EQ(Measure(plan, {Window(1000, 200)}), 3);
  EXPECT_TRUE(plan.stable());
  EXPECT_EQ(plan.first_reported(), 0);
}

TEST(Windows, MeasuresUntilRateAndLatencyAreStable) {
  // The rate rises, then the latency falls, then both stay.
  const std::vector<WindowResult> windows = {Window(100, 200), Window(150, 200), Window(200, 200),
                                             Window(200, 150), Window(200, 100), Window(205, 100),
                                             Window(198, 100)};
  WindowPlan plan(100 * kSecond, kSecond, 5, StabilityRule{});
  EXPECT_EQ(Measure(plan, windows), 7);
  EXPECT_TRUE(plan.stable());
  EXPECT_EQ(plan.first_reported(), 4);
}

TEST(Windows, WindowsThatNeverAgreeEndUnstable) {
  StabilityRule rule;
  rule.windows_max = 4;
  WindowPlan plan(100 * kSecond, kSecond, 5, rule);
  EXPECT_EQ(Measure(plan, {Window(100, 200), Window(200, 200), Window(100, 200), Window(200, 200)}),
            4);
  EXPECT_FALSE(plan.stable());
  EXPECT_TRUE(plan.done());
  EXPECT_EQ(plan.first_reported(), 1);
}

TEST(Windows, WithoutARuleAllWindowsAreMeasured) {
  WindowPlan plan(100 * kSecond, kSecond, 5, std::nullopt);
  EXPECT_EQ(Measure(plan, {Window(100, 200)}), 5);
  EXPECT_FALSE(plan.stable());
  EXPECT_EQ(plan.first_reported(), 0);
}

TEST(Windows, TheBoundIsTheDistanceFromTheMean) {
  const std::vector<WindowResult> windows = {Window(90, 200), Window(100, 200), Window(110, 200)};
  const WindowSpread spread = SpreadOf(windows, 95);
  EXPECT_THAT(spread.rate_percent, DoubleNear(10, 1e-9));
  EXPECT_EQ(spread.latency_percent, 0);
  EXPECT_TRUE(spread.Within(10.001));
  EXPECT_FALSE(spread.Within(9.999));
}

TEST(Windows, TheChosenPercentileDecides) {
  // One answer in ten is slow in the last window: p50 agrees, p95 does not.
  std::vector<WindowResult> windows(3, Window(100, 100));
  windows[2] = Window(90, 100);
  for (int i = 0; i < 10; ++i) windows[2].latency.Record(100000);
  windows[2].ok = 100;
  EXPECT_TRUE(SpreadOf(windows, 50).Within(10));
  EXPECT_FALSE(SpreadOf(windows, 95).Within(10));
}

TEST(Windows, AWindowWithoutAnswersAgreesWithNone) {
  EXPECT_TRUE(std::isinf(SpreadOf({Window(9, 1), Window(9, 1)}, 95).rate_percent));
  const std::vector<WindowResult> windows(3, Window(0, 0));
  EXPECT_FALSE(SpreadOf(windows, 95).Within(1e9));
}

TEST(Windows, EveryTimeBelongsToAWindow) {
  const WindowPlan plan(100 * kSecond, kSecond, 5, std::nullopt);
  EXPECT_EQ(plan.IndexOf(100 * kSecond), 0);
  EXPECT_EQ(plan.IndexOf(101 * kSecond - 1), 0);
  EXPECT_EQ(plan.IndexOf(101 * kSecond), 1);
  EXPECT_EQ(plan.IndexOf(105 * kSecond + 5), 4) << "late answers";
}

}  // namespace
}  // namespace attend::client
