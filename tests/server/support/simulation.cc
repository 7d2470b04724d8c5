// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace attend::test {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;

constexpr double kFlopsMax = 1e9;
constexpr int64_t kBytesMax = int64_t{1} << 20;

Duration Times(Duration duration, double factor) {
  return duration_cast<Duration>(std::chrono::duration<double>(duration) * factor);
}

}  // namespace

Simulation::Simulation(uint64_t seed, SimulationCoverage& coverage)
    : random_(seed), coverage_(coverage), now_(std::chrono::seconds(1000)) {
  Arrange();
}

void Simulation::Arrange() {
  const auto maybe = [this](double share, double low, double high) {
    return Uniform(0, 1) < share ? Uniform(low, high) : 0.0;
  };
  requests_ = Pick(50, 300);
  priorities_ = static_cast<int>(Pick(1, 4));
  deadline_share_ = maybe(0.6, 0.1, 1);
  large_share_ = maybe(0.5, 0.02, 0.3);
  cancel_share_ = maybe(0.5, 0.02, 0.3);
  failure_share_ = maybe(0.3, 0.02, 0.2);
  service_ = microseconds(Pick(100, 1000));
  arrival_gap_ = Times(service_, Uniform(0.02, 0.6));
  options_.lanes = static_cast<int>(Pick(1, 4));
  options_.queue.capacity = Pick(4, 64);
  options_.queue.aging = microseconds(Pick(100, 20'000));
  options_.queue.tenant_weights.clear();
  constexpr int32_t kWeights[] = {1, 2, 3, 10, kTenantWeightMax};
  for (int64_t tenants = Pick(1, 5); tenants > 0; --tenants) {
    options_.queue.tenant_weights.push_back(kWeights[Pick(0, std::ssize(kWeights) - 1)]);
  }
  options_.batcher.batch_requests_max = Pick(1, 12);
  options_.batcher.batch_flops_max = kFlopsMax;
  options_.batcher.batch_bytes_max = kBytesMax;
  options_.batcher.batch_delay = microseconds(static_cast<int64_t>(maybe(0.3, 1, 300)));
  running_.resize(static_cast<size_t>(options_.lanes));
  scheduler_ = std::make_unique<Scheduler>(options_);
  const Duration whole = arrival_gap_ * requests_;
  Schedule(now_, {Event::kArrival});
  if (Pick(0, 7) == 0) Schedule(now_ + Times(whole, Uniform(0, 1)), {Event::kClose});
  if (Pick(0, 7) == 0) Schedule(now_ + Times(whole, Uniform(0, 1)), {Event::kDrain});
}

void Simulation::Run() {
  while (!events_.empty() || wake_ != kNever) {
    now_ = events_.empty() ? wake_ : std::min(wake_, events_.begin()->first);
    while (!events_.empty() && events_.begin()->first <= now_) {
      const EventData event = events_.begin()->second;
      events_.erase(events_.begin());
      Handle(event);
    }
    // Plans as the device worker does: when a request came or ended, and at the requested wake-up.
    if (plan_stale_ || wake_ <= now_) Plan();
    if (::testing::Test::HasFailure()) return;
  }
  CheckEnd();
}

void Simulation::Handle(const EventData& event) {
  switch (event.kind) {
    case Event::kArrival:
      return Arrive();
    case Event::kCancel:
      return Cancel(event.id);
    case Event::kLaneDone:
      return EndLane(event.lane);
    case Event::kClose:
      return Close(Unavailable("the server is stopping"));
    case Event::kDrain:
      draining_ = true;
  }
}

Simulation::Known Simulation::MakeKnown() {
  const int tenants = static_cast<int>(options_.queue.tenant_weights.size());
  Known known;
  known.id = static_cast<uint64_t>(++arrived_);
  // The first tenants ask most.
  known.tenant = static_cast<int>(Pick(0, Pick(0, tenants - 1)));
  known.priority = static_cast<int32_t>(Pick(0, priorities_ - 1)) * 7 - 9;
  known.enqueued = now_;
  if (Uniform(0, 1) < deadline_share_) {
    known.deadline = now_ + microseconds(1) + Times(service_, Uniform(0, 20));
  }
  known.flops = std::pow(10, Uniform(3, 9));
  known.bytes = static_cast<int64_t>(std::pow(2, Uniform(8, 20)));
  if (Uniform(0, 1) < large_share_) {
    if (Pick(0, 1) == 0) {
      known.flops = std::pow(10, Uniform(9.001, 11));
    } else {
      known.bytes = kBytesMax + Pick(1, 100 * kBytesMax);
    }
  }
  known.large = known.flops > kFlopsMax || known.bytes > kBytesMax;
  const double share = std::max(known.flops / kFlopsMax,
                                static_cast<double>(known.bytes) / static_cast<double>(kBytesMax));
  known.cost = std::max(share, 1.0 / 1024);
  known.started_before = LevelOf(known.priority).started;
  return known;
}

Simulation::Level& Simulation::LevelOf(int32_t priority) {
  Level& level = levels_[priority];
  level.started.resize(options_.queue.tenant_weights.size());
  level.cost_max.resize(options_.queue.tenant_weights.size());
  return level;
}

void Simulation::Arrive() {
  if (draining_ || arrived_ == requests_) return;
  Known known = MakeKnown();
  auto request = std::make_unique<Request>();
  request->id = known.id;
  request->tenant = known.tenant;
  request->priority = known.priority;
  request->deadline = known.deadline;
  request->flops = request->kernel_cost = known.flops;
  request->batch_bytes = known.bytes;
  const auto waiting = std::ssize(Waiting());
  const Status status = scheduler_->Push(request, now_);
  EXPECT_EQ(status.ok(), request == nullptr) << "taken if and only if OK";
  EXPECT_EQ(status.code(), closed_                              ? Code::kUnavailable
                           : waiting == options_.queue.capacity ? Code::kResourceExhausted
                                                                : Code::kOk);
  if (status.ok()) {
    plan_stale_ = true;
    ++accepted_;
    ++coverage_.accepted;
    if (Uniform(0, 1) < cancel_share_) {
      Schedule(now_ + Times(service_, Uniform(0, 5)), {Event::kCancel, known.id});
    }
    known_.emplace(known.id, std::move(known));
  } else {
    ++(closed_ ? coverage_.refused_closed : coverage_.refused_full);
  }
  // Bursts, idle times, and gaps between.
  const int64_t kind = Pick(0, 99);
  const double gap = kind < 30 ? 0 : kind < 32 ? Uniform(20, 100) : -std::log(Uniform(1e-9, 1));
  Schedule(now_ + Times(arrival_gap_, gap), {Event::kArrival});
}

void Simulation::Cancel(uint64_t id) {
  const auto found = known_.find(id);
  const bool waits = found != known_.end() && !found->second.running;
  if (found != known_.end() && found->second.deadline <= now_) {
    LevelOf(found->second.priority).late.insert(found->second.tenant);
  }
  std::unique_ptr<Request> request = scheduler_->Cancel(id, now_);
  ASSERT_EQ(request != nullptr, waits) << "cancels what is queued and nothing else";
  if (request == nullptr) return;
  const bool late = found->second.deadline <= now_;
  EXPECT_EQ(request->status.code(), late ? Code::kDeadlineExceeded : Code::kCancelled);
  ++(late ? coverage_.expired : coverage_.cancelled);
  End(std::move(request));
}

void Simulation::EndLane(int lane) {
  RunningBatch batch = std::exchange(running_[static_cast<size_t>(lane)], {});
  scheduler_->LaneEnded(lane, BatchEnd::kFailed, now_);
  const bool failed = Uniform(0, 1) < failure_share_;
  // As the device worker does: a lost device accepts nothing before its requests end.
  if (failed && Pick(0, 9) == 0) Close(Unavailable("the device is lost"));
  for (auto& request : batch.requests) {
    request->status = failed ? Internal("planted fault") : Status();
    ++(failed ? coverage_.failed : coverage_.ok);
    End(std::move(request));
  }
  scheduler_->LaneDone(lane);
  plan_stale_ = true;
}

void Simulation::Close(const Status& status) {
  closed_ = true;
  for (auto& request : scheduler_->Close(status)) {
    EXPECT_EQ(request->status.code(), Code::kUnavailable);
    EXPECT_FALSE(known_.at(request->id).running);
    ++coverage_.stopped;
    End(std::move(request));
  }
  EXPECT_TRUE(Waiting().empty()) << "a close ends all that is queued";
}

void Simulation::Plan() {
  plan_stale_ = false;
  for (const auto& [id, known] : known_) {
    if (known.deadline <= now_) LevelOf(known.priority).late.insert(known.tenant);
  }
  Scheduler::Step step = scheduler_->Plan(now_);
  for (auto& request : step.ended) {
    const auto found = known_.find(request->id);
    ASSERT_TRUE(found != known_.end()) << request->id << " ended twice";
    EXPECT_FALSE(found->second.running);
    EXPECT_EQ(request->status.code(), Code::kDeadlineExceeded);
    EXPECT_EQ(found->second.deadline, now_) << "a deadline fires when it is there";
    ++coverage_.expired;
    End(std::move(request));
  }
  for (Scheduler::Launch& launch : step.launches) {
    Start(std::move(launch));
    if (::testing::Test::HasFailure()) return;
  }
  wake_ = step.wake;
  CheckWorkConservation();
}

void Simulation::Start(Scheduler::Launch launch) {
  ASSERT_FALSE(launch.requests.empty());
  for (const auto& request : launch.requests) {
    const auto found = known_.find(request->id);
    ASSERT_TRUE(found != known_.end() && !found->second.running) << request->id << " started twice";
    ASSERT_GT(found->second.deadline, now_) << "expired work runs";
  }
  const bool large_allowed = LargeAllowed();
  CheckAging(launch, large_allowed);
  bool aged = launch.aged;
  double cost = 0;
  for (const auto& request : launch.requests) {
    Known& known = known_.at(request->id);
    CheckOrder(known, std::exchange(aged, false), large_allowed);
    known.running = true;
    cost += known.cost;
    CheckShares(known);
  }
  CheckBudgets(launch, large_allowed);
  ++coverage_.batches;
  coverage_.large_batches += launch.large;
  coverage_.aged_batches += launch.aged;
  ++coverage_.closed[static_cast<int>(launch.closed)];
  RunningBatch& lane = running_.at(static_cast<size_t>(launch.lane));
  ASSERT_TRUE(lane.requests.empty()) << "two batches on one lane";
  lane = {std::move(launch.requests), launch.large};
  const double factor = Uniform(0.2, 1.5) * std::min(cost, 20.0);
  Schedule(now_ + microseconds(1) + Times(service_, factor), {Event::kLaneDone, 0, launch.lane});
}

void Simulation::End(std::unique_ptr<Request> request) {
  ASSERT_EQ(known_.erase(request->id), 1u) << request->id << " ended twice";
  ++ended_;
}

}  // namespace attend::test
