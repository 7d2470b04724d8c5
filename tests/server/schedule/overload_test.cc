// SPDX-License-Identifier: Apache-2.0
//
// Devices under more load than they can handle, and deadlines that cannot be met by waiting.

#include <gtest/gtest.h>

#include <string>

#include "tests/server/support/loaded_device.h"
#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The counts cover this much simulated time.
constexpr seconds kLength{8};

SchedulerOptions Options(int lanes, TenantWeights weights = {1}) {
  return {.lanes = lanes,
          .queue = {.tenant_weights = std::move(weights)},
          .batcher = {.batch_flops_max = 4e6}};
}

// Requests answered in time, per second, after a warm-up under the same load.
double Goodput(LoadedDevice& device, const std::vector<Load>& loads, size_t of = 0) {
  device.Run(loads, seconds(2));
  return static_cast<double>(device.Run(loads, kLength)[of].in_time) / kLength.count();
}

// At 10 ms each the device serves 100 per second. In order of deadlines, less than one would be in
// time.
TEST(Overload, NewestFirstKeepsGoodputWithoutEstimates) {
  LoadedDevice device(Options(2));
  device.learns = false;
  EXPECT_GT(Goodput(device, {{.rate_per_s = 300, .deadline = milliseconds(100)}}), 70);
}

class OverloadGoodput : public ::testing::TestWithParam<int> {};  // lanes

TEST_P(OverloadGoodput, StaysNearTheBestInOpenLoops) {
  for (const int deadline : {3, 5, 10, 20}) {
    for (const double rate : {150, 300, 1000}) {
      LoadedDevice device(Options(GetParam()));
      EXPECT_GT(Goodput(device, {{.rate_per_s = rate, .deadline = milliseconds(10 * deadline)}}),
                90)
          << rate << "/s, deadlines of " << deadline << " times what a request takes";
    }
  }
}

TEST_P(OverloadGoodput, StaysNearTheBestInClosedLoops) {
  for (const int deadline : {3, 5, 10, 20}) {
    for (const int callers : {2, 3, 6, 20, 64}) {
      LoadedDevice device(Options(GetParam()));
      EXPECT_GT(Goodput(device, {{.callers = callers, .deadline = milliseconds(10 * deadline)}}),
                90)
          << callers << " callers, deadlines of " << deadline << " times what a request takes";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, OverloadGoodput, ::testing::Values(1, 2, 4));

TEST(Overload, RunningRequestsAreRarelyStopped) {
  LoadedDevice device(Options(2));
  const std::vector<Load> loads = {{.rate_per_s = 1000, .deadline = milliseconds(50)}};
  device.Run(loads, seconds(2));
  const LoadCounts counts = device.Run(loads, kLength)[0];
  EXPECT_LE(counts.stopped, counts.in_time / 50);
  EXPECT_GE(counts.refused, counts.sent * 8 / 10) << "on arrival, not from the queue";
}

TEST(Overload, BelowCapacityNothingIsRefused) {
  LoadedDevice device(Options(2));
  const std::vector<Load> loads = {{.rate_per_s = 50, .deadline = milliseconds(200)}};
  const LoadCounts counts = device.Run(loads, kLength)[0];
  EXPECT_EQ(counts.refused + counts.dropped + counts.stopped, 0);
}

TEST(Overload, RecoversFromAWrongEstimate) {
  for (const double slowness : {0.02, 0.2, 5.0, 50.0}) {
    LoadedDevice device(Options(2));
    const Load load{.rate_per_s = 300, .deadline = milliseconds(1000)};
    device.slowness = slowness;
    device.Run({load}, seconds(10));
    device.slowness = 1;
    device.Run({load}, seconds(5));
    const LoadCounts counts = device.Run({load}, seconds(10))[0];
    EXPECT_GT(counts.in_time, 900) << "after all took " << slowness << " times as long";
  }
}

TEST(Overload, HopelessRequestsAreRefusedAtLittleCost) {
  LoadedDevice device(Options(2));
  const std::vector<Load> loads = {
      {.rate_per_s = 300, .deadline = milliseconds(100)},
      {.rate_per_s = 20, .cost = 1e9, .takes = seconds(10), .deadline = milliseconds(500)}};
  EXPECT_GT(Goodput(device, loads), 80);
}

TEST(Overload, RequestsWithoutDeadlinesAreNeverRefused) {
  LoadedDevice device(Options(2));
  const std::vector<Load> loads = {{.rate_per_s = 20},
                                   {.rate_per_s = 300, .deadline = milliseconds(100)}};
  device.Run(loads, seconds(2));
  const std::vector<LoadCounts> counts = device.Run(loads, kLength);
  EXPECT_EQ(counts[0].refused + counts[0].dropped + counts[0].stopped, 0);
  EXPECT_GE(counts[0].in_time, counts[0].sent - 30) << "those of the last second or so still wait";
  EXPECT_GT(counts[0].in_time + counts[1].in_time, 90 * kLength.count());
}

TEST(Overload, ATenantsBacklogDoesNotRefuseOthers) {
  LoadedDevice device(Options(2, {1, 1}));
  const Load flood{.rate_per_s = 1000, .deadline = milliseconds(200), .tenant = 0};
  const Load modest{.rate_per_s = 20, .deadline = milliseconds(200), .tenant = 1};
  device.Run({flood, modest}, seconds(2));
  const std::vector<LoadCounts> counts = device.Run({flood, modest}, kLength);
  EXPECT_GE(counts[1].in_time, counts[1].sent * 95 / 100);
  EXPECT_GT(counts[0].in_time + counts[1].in_time, 90 * kLength.count());
}

TEST(Overload, SharesAreByWeight) {
  LoadedDevice device(Options(2, {1, 3}));
  const std::vector<Load> loads = {{.rate_per_s = 500, .deadline = milliseconds(300), .tenant = 0},
                                   {.rate_per_s = 500, .deadline = milliseconds(300), .tenant = 1}};
  device.Run(loads, seconds(2));
  const std::vector<LoadCounts> counts = device.Run(loads, kLength);
  EXPECT_GT(counts[0].in_time + counts[1].in_time, 90 * kLength.count());
  EXPECT_NEAR(static_cast<double>(counts[1].in_time) / static_cast<double>(counts[0].in_time), 3,
              0.6);
}

TEST(Overload, HigherPrioritiesAreInTime) {
  LoadedDevice device(Options(2));
  const std::vector<Load> loads = {
      {.rate_per_s = 1000, .deadline = milliseconds(200)},
      {.rate_per_s = 30, .deadline = milliseconds(200), .priority = 1}};
  device.Run(loads, seconds(2));
  const std::vector<LoadCounts> counts = device.Run(loads, kLength);
  EXPECT_GE(counts[1].in_time, counts[1].sent * 95 / 100);
  EXPECT_GT(counts[0].in_time + counts[1].in_time, 87 * kLength.count());
}

TEST(Overload, SmallRequestsPassLargeOnes) {
  LoadedDevice device(Options(2));
  const std::vector<Load> loads = {
      {.callers = 4, .cost = 1e8, .takes = seconds(1), .deadline = seconds(20)},
      {.rate_per_s = 20, .deadline = milliseconds(100)}};
  device.Run(loads, seconds(5));
  const std::vector<LoadCounts> counts = device.Run(loads, kLength);
  EXPECT_GE(counts[1].in_time, counts[1].sent * 95 / 100);
  EXPECT_GT(counts[0].in_time, kLength.count() / 2);
}

// Small requests beside large ones of another kind, whose times the cost model gets wrong.
TEST(Overload, MixedSizesStayNearTheBest) {
  for (const int lanes : {1, 2, 4}) {
    LoadedDevice device(Options(lanes));
    const std::vector<Load> loads = {
        {.rate_per_s = 500, .cost = 1e4, .takes = milliseconds(1), .deadline = milliseconds(20)},
        {.rate_per_s = 30, .cost = 3e6, .takes = milliseconds(50), .deadline = milliseconds(400)}};
    device.Run(loads, seconds(2));
    const std::vector<LoadCounts> counts = device.Run(loads, kLength);
    const double busy = static_cast<double>(counts[0].in_time) * 0.001 +
                        static_cast<double>(counts[1].in_time) * 0.05;
    EXPECT_GT(busy, 0.85 * kLength.count())
        << lanes << " lanes: " << counts[0].in_time << " small ones and " << counts[1].in_time
        << " larger ones";
  }
}

}  // namespace
}  // namespace attend::test
