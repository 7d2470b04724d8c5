// SPDX-License-Identifier: Apache-2.0
//
// One seeded schedule through the real scheduler (queue, order, batcher, lanes' state) with a
// manual clock and lanes of random durations: random tenants, weights, priorities, deadlines,
// sizes, bursts, cancellations, failing lanes, a lost device, a drain or a stop in the middle.
// Every invariant of queue_order.h, batcher.h and scheduler.h is checked at every step from the
// requests alone, independent of the scheduler's own state.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "server/schedule/scheduler.h"
#include "server/util/thresholds.h"

namespace attend::test {

// Counts of the cases that all schedules together have covered, as a check of a case that never
// occurs proves nothing.
struct SimulationCoverage {
  int64_t accepted = 0;
  int64_t refused_full = 0;
  int64_t refused_closed = 0;
  int64_t ok = 0;
  int64_t failed = 0;
  int64_t expired = 0;
  int64_t cancelled = 0;
  int64_t stopped = 0;
  int64_t batches = 0;
  int64_t large_batches = 0;
  int64_t aged_batches = 0;
  int64_t delayed = 0;          // a lane idled during the batch delay
  int64_t large_held_back = 0;  // a lane idled because only large requests waited
  int64_t closed[kBatchClosedCount] = {};
};

class Simulation {
 public:
  Simulation(uint64_t seed, SimulationCoverage& coverage);

  // Runs to the end. Faults are GoogleTest failures; it stops at the first.
  void Run();

 private:
  enum class Event { kArrival, kCancel, kLaneDone, kClose, kDrain };
  struct EventData {
    Event kind;
    uint64_t id = 0;  // of the request
    int lane = 0;
  };
  // An accepted request that has not ended, as the simulation knows it.
  struct Known {
    uint64_t id = 0;
    int tenant = 0;
    int32_t priority = 0;
    TimePoint enqueued;
    TimePoint deadline = kNever;
    double flops = 0;
    int64_t bytes = 0;
    double cost = 0;  // in batches
    bool large = false;
    bool running = false;  // else it waits
    // Cost that each tenant had started at this priority when the request arrived.
    std::vector<double> started_before;
  };
  // Statistics of one priority.
  struct Level {
    std::vector<double> started;   // cost, by tenant
    std::vector<double> cost_max;  // of a started request, by tenant
    std::set<int> late;            // tenants of which a request's deadline passed
    int64_t passed_over = 0;       // batches without it while it waited too long
  };
  struct RunningBatch {
    std::vector<std::unique_ptr<Request>> requests;
    bool large = false;
  };

  void Arrange();
  void Schedule(TimePoint at, EventData event) { events_.emplace(at, event); }
  void Handle(const EventData& event);
  Known MakeKnown();
  Level& LevelOf(int32_t priority);
  void Arrive();
  void Cancel(uint64_t id);
  void EndLane(int lane);
  void Close(const Status& status);
  void Plan();
  void Start(Scheduler::Launch launch);
  void End(std::unique_ptr<Request> request);

  std::vector<const Known*> Waiting() const;
  // Whether a large request may start now.
  bool LargeAllowed() const;
  static bool MayRun(const Known& waiting, bool large_allowed) {
    return large_allowed || !waiting.large;
  }
  void CheckBudgets(const Scheduler::Launch& launch, bool large_allowed) const;
  void CheckAging(const Scheduler::Launch& launch, bool large_allowed);
  void CheckOrder(const Known& started, bool aged, bool large_allowed) const;
  void CheckShares(const Known& started);
  void CheckWorkConservation() const;
  void CheckEnd() const;

  double Uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }
  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  std::mt19937_64 random_;
  SimulationCoverage& coverage_;
  SchedulerOptions options_{.queue = {.tenant_weights = {1}}, .batcher = {}};
  int64_t requests_ = 0;
  int priorities_ = 1;
  double deadline_share_ = 0;
  double large_share_ = 0;
  double cancel_share_ = 0;
  double failure_share_ = 0;
  Duration arrival_gap_{};
  Duration service_{};  // of a whole batch

  std::unique_ptr<Scheduler> scheduler_;
  TimePoint now_;
  TimePoint wake_ = kNever;
  std::multimap<TimePoint, EventData> events_;
  std::map<uint64_t, Known> known_;
  std::vector<RunningBatch> running_;  // by lane
  std::map<int32_t, Level> levels_;
  int64_t arrived_ = 0;
  int64_t accepted_ = 0;
  int64_t ended_ = 0;
  int64_t batches_since_aged_ = thresholds::kAgedEvery;
  bool plan_stale_ = false;  // something changed since the last plan
  bool closed_ = false;
  bool draining_ = false;
};

}  // namespace attend::test
