// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// ATTEND_TEST_SEED=N runs the schedule that failed with seed N first.
TEST(Simulation, RandomSchedulesKeepEveryInvariant) {
  const auto schedules = std::max<uint64_t>(500, static_cast<uint64_t>(5000 * TestScale()));
  const auto met_min = static_cast<int64_t>(schedules / 50);
  const uint64_t base = FreshSeed();
  SimulationCoverage met;
  for (uint64_t seed = base; seed - base < schedules; ++seed) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
    Simulation(seed, met).Run();
    if (HasFailure()) return;
  }
  for (const int64_t each :
       {met.accepted, met.refused_full, met.refused_closed, met.ok, met.failed, met.expired,
        met.cancelled, met.stopped, met.batches, met.large_batches, met.aged_batches, met.delayed,
        met.large_held_back}) {
    EXPECT_GT(each, met_min) << "seed " << base << ": a case that the checks hardly met";
  }
  for (int i = 0; i < kBatchClosedCount; ++i) {
    // nothing is asserted about timing
    if (i == static_cast<int>(BatchClosed::kDeadlines)) continue;
    EXPECT_GT(met.closed[i], met_min) << i;
  }
}

// Backlogged tenants get cost in proportion to their weights, whatever they request and whichever
// of them set deadlines. Their tags differ by at most (B + 1) / w: one's largest request, and the
// batch that a deadline may lead. So do their shares since the start.
TEST(Simulation, BacklogsShareByWeight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const TenantWeights weights = {1, 2, 5, 20};
  const SchedulerOptions options{.queue = {.tenant_weights = weights},
                                 .batcher = {.batch_requests_max = 8, .batch_flops_max = 1e9}};
  Scheduler scheduler(options);
  TimePoint now(std::chrono::seconds(1000));
  std::vector<double> started(weights.size());
  uint64_t id = 0;
  // Each tenant has its own sizes, from thousandths of a batch to whole ones.
  const auto push = [&](int tenant) {
    auto request = std::make_unique<Request>();
    request->id = ++id;
    request->tenant = tenant;
    const double low = tenant % 2 ? 6.1 : 8;
    request->kernel_cost = std::pow(10, std::uniform_real_distribution(low, low + 1)(random));
    if (tenant < 2) request->deadline = now + std::chrono::hours(1);
    ASSERT_TRUE(scheduler.Push(request, now).ok());
  };
  for (int round = 0; round < 10; ++round) {
    for (int tenant = 0; tenant < std::ssize(weights); ++tenant) push(tenant);
  }
  for (int batch = 0; batch < 200'000; ++batch) {
    now += std::chrono::milliseconds(1);
    Scheduler::Step step = scheduler.Plan(now);
    ASSERT_EQ(step.launches.size(), 1u);
    for (const auto& request : step.launches[0].requests) {
      started[request->tenant] +=
          std::max(std::ceil(request->kernel_cost / 1e9 * (1 << 20)) / (1 << 20), 1.0 / 1024);
      push(request->tenant);
    }
    scheduler.LaneDone(0);
  }
  constexpr double kRounding = 1e-3;  // one unit of virtual time for each of about 10^6 requests
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_GT(started[i] / weights[i], 100) << "too short to tell";
    for (size_t j = 0; j < i; ++j) {
      EXPECT_LE(std::abs(started[i] / weights[i] - started[j] / weights[j]),
                2.0 / weights[i] + 2.0 / weights[j] + kRounding)
          << i << " and " << j;
    }
  }
}

}  // namespace
}  // namespace attend::test
