// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/loaded_device.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attend::test {
namespace {

// A refused caller comes back after this time.
constexpr Duration kRest = std::chrono::milliseconds(5);

Duration Nanoseconds(double ns) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(ns)));
}

}  // namespace

LoadedDevice::LoadedDevice(const SchedulerOptions& options, uint64_t seed)
    : random_(seed), scheduler_(options), lanes_(static_cast<size_t>(options.lanes)) {}

std::vector<LoadCounts> LoadedDevice::Run(const std::vector<Load>& loads, Duration duration) {
  loads_ = loads;
  counts_.assign(loads.size(), {});
  load_of_.clear();
  arrivals_.clear();
  for (size_t load = 0; load < loads.size(); ++load) {
    for (int i = 0; i < std::max(1, loads[load].callers); ++i) arrivals_.emplace(now_, load);
  }
  const TimePoint end = now_ + duration;
  while (now_ < end) {
    Plan();
    TimePoint next = std::min({NextEnd(), wake_, end});
    if (!arrivals_.empty()) next = std::min(next, arrivals_.begin()->first);
    Advance(std::max(now_, next));
    EndBatches();
    while (!arrivals_.empty() && arrivals_.begin()->first <= now_) {
      const size_t load = arrivals_.begin()->second;
      arrivals_.erase(arrivals_.begin());
      Send(load);
    }
  }
  return counts_;
}

void LoadedDevice::Send(size_t n) {
  const Load& load = loads_[n];
  auto request = std::make_unique<Request>();
  const uint64_t id = request->id = next_id_++;
  request->tenant = load.tenant;
  request->priority = load.priority;
  request->received = now_;
  if (load.deadline > Duration::zero()) request->deadline = now_ + load.deadline;
  request->flops = request->kernel_cost = load.cost;
  load_of_[id] = n;
  ++counts_[n].sent;
  if (!scheduler_.Push(request, now_).ok()) {
    ++counts_[n].refused;
    if (load.rate_per_s == 0) Again(n, kRest);
  }
  if (load.rate_per_s > 0) {
    const double gap = std::exponential_distribution(load.rate_per_s)(random_);
    Again(n, Nanoseconds(gap * 1e9));
  }
}

void LoadedDevice::Again(size_t load, Duration after) { arrivals_.emplace(now_ + after, load); }

void LoadedDevice::Plan() {
  Scheduler::Step step = scheduler_.Plan(now_);
  for (const auto& request : step.ended) Count(*request);
  for (Scheduler::Launch& launch : step.launches) {
    Batch& batch = lanes_[static_cast<size_t>(launch.lane)];
    batch.requests = std::move(launch.requests);
    batch.left_ns = 0;
    for (const auto& request : batch.requests) {
      const auto found = load_of_.find(request->id);
      if (found == load_of_.end()) continue;  // of a run before this one
      batch.left_ns += static_cast<double>(loads_[found->second].takes.count()) * slowness;
    }
  }
  wake_ = step.wake;
}

TimePoint LoadedDevice::NextEnd() const {
  const auto busy = std::count_if(lanes_.begin(), lanes_.end(),
                                  [](const Batch& batch) { return !batch.requests.empty(); });
  double least = 1e18;
  for (const Batch& batch : lanes_) {
    if (!batch.requests.empty()) least = std::min(least, batch.left_ns);
  }
  return busy == 0 ? kNever : now_ + Nanoseconds(least * static_cast<double>(busy));
}

void LoadedDevice::Advance(TimePoint to) {
  const auto busy = std::count_if(lanes_.begin(), lanes_.end(),
                                  [](const Batch& batch) { return !batch.requests.empty(); });
  for (Batch& batch : lanes_) {
    if (batch.requests.empty()) continue;
    batch.left_ns -= static_cast<double>((to - now_).count()) / static_cast<double>(busy);
  }
  now_ = to;
}

void LoadedDevice::EndBatches() {
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    Batch& batch = lanes_[lane];
    if (batch.requests.empty()) continue;
    const bool stopped = std::all_of(batch.requests.begin(), batch.requests.end(),
                                     [](const auto& each) { return each->stop.set(); });
    if (batch.left_ns > 1 && !stopped) continue;
    const BatchEnd end = !learns             ? BatchEnd::kFailed
                         : batch.left_ns > 1 ? BatchEnd::kStopped
                                             : BatchEnd::kWhole;
    scheduler_.LaneEnded(static_cast<int>(lane), end, now_);
    for (const auto& request : std::exchange(batch.requests, {})) Count(*request);
    scheduler_.LaneDone(static_cast<int>(lane));
  }
}

void LoadedDevice::Count(const Request& request) {
  const auto found = load_of_.find(request.id);
  if (found == load_of_.end()) return;
  LoadCounts& counts = counts_[found->second];
  const bool ok = request.status.ok() && !request.stop.set() && now_ <= request.deadline;
  ++(ok ? counts.in_time : !request.status.ok() ? counts.dropped : counts.stopped);
  if (loads_[found->second].rate_per_s == 0)
    Again(found->second, request.status.ok() ? Duration{} : kRest);
}

}  // namespace attend::test
