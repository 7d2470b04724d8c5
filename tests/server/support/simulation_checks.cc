// SPDX-License-Identifier: Apache-2.0
//
// Invariants that hold at every step of a simulation.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "tests/server/support/simulation.h"

namespace attend::test {

std::vector<const Simulation::Known*> Simulation::Waiting() const {
  std::vector<const Known*> waiting;
  for (const auto& [id, known] : known_) {
    if (!known.running) waiting.push_back(&known);
  }
  return waiting;
}

bool Simulation::LargeAllowed() const {
  int large = 0;
  for (const RunningBatch& batch : running_) large += batch.large;
  return options_.lanes == 1 ? large == 0 : large + 1 < options_.lanes;
}

// A batch stays within each budget and names the true reason why it was closed; large requests run
// alone, on all lanes but one.
void Simulation::CheckBudgets(const Scheduler::Launch& launch, bool large_allowed) const {
  double flops = 0;
  int64_t bytes = 0;
  bool large = false;
  for (const auto& request : launch.requests) {
    flops += request->flops;
    bytes += request->batch_bytes;
    large |= known_.at(request->id).large;
  }
  const BatcherOptions& budget = options_.batcher;
  EXPECT_EQ(launch.large, large);
  EXPECT_DOUBLE_EQ(launch.flops, flops);
  EXPECT_LE(std::ssize(launch.requests), large ? 1 : budget.batch_requests_max);
  if (large) {
    EXPECT_TRUE(large_allowed) << "large requests hold every lane";
    EXPECT_EQ(launch.closed, BatchClosed::kLarge);
    return;
  }
  EXPECT_LE(flops, budget.batch_flops_max);
  EXPECT_LE(bytes, budget.batch_bytes_max);
  const auto any_left = [&](auto condition) {
    const auto waiting = Waiting();
    return std::any_of(waiting.begin(), waiting.end(), [&](const Known* each) {
      return MayRun(*each, large_allowed) && condition(*each);
    });
  };
  const auto is_full = [&](const Known& next) {
    return launch.closed == BatchClosed::kFlops ? flops + next.flops > budget.batch_flops_max
                                                : bytes + next.bytes > budget.batch_bytes_max;
  };
  switch (launch.closed) {
    case BatchClosed::kDelay:
      EXPECT_GT(budget.batch_delay, Duration::zero());
      [[fallthrough]];
    case BatchClosed::kEmpty:
      EXPECT_FALSE(any_left([](const Known&) { return true; })) << "the batch leaves what fits";
      break;
    case BatchClosed::kRequests:
      EXPECT_EQ(std::ssize(launch.requests), budget.batch_requests_max);
      break;
    case BatchClosed::kLarge:
      EXPECT_TRUE(any_left([](const Known& next) { return next.large; }));
      break;
    default:
      EXPECT_TRUE(any_left(is_full)) << "closed by a budget that holds what waits";
  }
}

// Lower priorities that wait too long are served in time, and no more often than specified.
void Simulation::CheckAging(const Scheduler::Launch& launch, bool large_allowed) {
  std::map<int32_t, TimePoint> oldest;  // by priority
  std::set<int32_t> may_run;
  for (const Known* each : Waiting()) {
    const auto at = oldest.try_emplace(each->priority, each->enqueued).first;
    at->second = std::min(at->second, each->enqueued);
    if (MayRun(*each, large_allowed)) may_run.insert(each->priority);
  }
  ASSERT_FALSE(may_run.empty());
  const int32_t top = *may_run.rbegin();
  const auto waits_long = [&](int32_t priority) {
    return may_run.contains(priority) && priority != top &&
           now_ - oldest.at(priority) >= options_.queue.aging;
  };
  std::set<int32_t> taken;
  for (const auto& request : launch.requests) taken.insert(request->priority);
  ++batches_since_aged_;
  if (launch.aged) {
    EXPECT_TRUE(waits_long(launch.requests.front()->priority));
    EXPECT_GE(batches_since_aged_, thresholds::kAgedEvery) << "aged requests crowd out the order";
    batches_since_aged_ = 0;
  }
  for (auto& [priority, level] : levels_) {
    if (taken.contains(priority) || !waits_long(priority)) {
      level.passed_over = 0;
    } else {
      ++level.passed_over;
      EXPECT_LT(level.passed_over, thresholds::kAgedEvery * (priorities_ - 1))
          << "priority " << priority;
    }
  }
}

// `started` comes before everything that waits beside it. If the queue may be late, requests due at
// their deadlines may come newest first, after the other due ones and before those that are not
// due.
void Simulation::CheckOrder(const Known& started, bool aged, bool large_allowed) const {
  const auto due = [this](const Known& known) {
    return std::min(known.deadline, known.enqueued + options_.queue.aging);
  };
  const auto place = [&](const Known& known) { return std::tuple(due(known), known.id); };
  const auto turn = [&](const Known& known) {
    return due(known) == known.deadline ? 1 : due(known) <= now_ ? 0 : 2;
  };
  const bool late = levels_.at(started.priority).late.contains(started.tenant);
  for (const Known* each : Waiting()) {
    if (!MayRun(*each, large_allowed)) continue;
    EXPECT_TRUE(aged || each->priority <= started.priority)
        << started.id << " overtakes the higher priority of " << each->id;
    if (each->tenant != started.tenant || each->priority != started.priority) continue;
    const bool newest = turn(started) == 1 && turn(*each) == 1 && started.id > each->id;
    if (late && (newest || turn(started) < turn(*each))) continue;
    EXPECT_LE(place(started), place(*each)) << started.id << " before " << each->id;
    EXPECT_LE(started.enqueued, each->enqueued + options_.queue.aging) << "overtaken too late";
  }
}

// No request waits for more of another tenant's work than queue_order.h allows.
void Simulation::CheckShares(const Known& started) {
  Level& level = LevelOf(started.priority);
  const auto j = static_cast<size_t>(started.tenant);
  level.started[j] += started.cost;
  level.cost_max[j] = std::max(level.cost_max[j], started.cost);
  const TenantWeights& weights = options_.queue.tenant_weights;
  constexpr double kRounding = 1e-3;  // 2^-20 batches for each of some hundred requests
  for (const Known* each : Waiting()) {
    const auto i = static_cast<size_t>(each->tenant);
    // A large request may run indefinitely only if it has the lane to itself.
    if (each->priority != started.priority || i == j || (each->large && options_.lanes > 1)) {
      continue;
    }
    const double own = level.started[i] - each->started_before[i];
    const double others = level.started[j] - each->started_before[j];
    EXPECT_LE(others, static_cast<double>(weights[j]) / weights[i] * (own + level.cost_max[i] + 1) +
                          level.cost_max[j] + 2 + kRounding)
        << each->id << " of tenant " << i << " starves behind tenant " << j;
  }
}

// No lane idles while a request may run, except during the batch delay, and no event is slept
// through.
void Simulation::CheckWorkConservation() const {
  EXPECT_GT(wake_, now_) << "a wake-up that changes nothing";
  const bool idle = std::any_of(running_.begin(), running_.end(),
                                [](const RunningBatch& batch) { return batch.requests.empty(); });
  const bool large_allowed = LargeAllowed();
  TimePoint oldest = kNever;
  int64_t held_back = 0;
  for (const Known* each : Waiting()) {
    EXPECT_LE(wake_, each->deadline) << "nothing would end " << each->id;
    if (!idle) continue;
    if (!MayRun(*each, large_allowed)) {
      ++held_back;
      continue;
    }
    EXPECT_FALSE(each->large) << "a lane idles while a large request may run";
    oldest = std::min(oldest, each->enqueued);
  }
  if (oldest == kNever) {
    coverage_.large_held_back += held_back;
    return;
  }
  ++coverage_.delayed;
  EXPECT_GT(oldest + options_.batcher.batch_delay, now_) << "a lane idles while work waits";
  EXPECT_LE(wake_, oldest + options_.batcher.batch_delay);
}

void Simulation::CheckEnd() const {
  EXPECT_TRUE(known_.empty()) << known_.size() << " never ended";
  EXPECT_EQ(accepted_, ended_);
  EXPECT_TRUE(scheduler_->queue().empty());
  EXPECT_EQ(scheduler_->lanes().free, options_.lanes);
  EXPECT_TRUE(scheduler_->running().empty());
  for (int tenant = 0; tenant < scheduler_->queue().tenants(); ++tenant) {
    EXPECT_EQ(scheduler_->queue().tenant_size(tenant), 0);
  }
}

}  // namespace attend::test
