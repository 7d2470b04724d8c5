// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/router.h"

#include <algorithm>
#include <cassert>
#include <limits>

#include "server/schedule/fair_share.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

double SpeedOf(const DeviceInfo& info) {
  const double units = std::max(1, info.units);
  return info.kind == DeviceKind::kCuda ? thresholds::kThreadsPerMultiprocessor * units : units;
}

// Bounded so that the sum over every request a queue can hold fits in 64 bits.
int64_t BoundedCost(int64_t cost) { return std::clamp<int64_t>(cost, 0, kCostMax >> 2); }

}  // namespace

Router::Router(const std::vector<DeviceInfo>& devices) : loads_(devices.size()) {
  for (const DeviceInfo& info : devices) speeds_.push_back(SpeedOf(info));
}

template <class CostOf>
size_t Router::BestLocked(std::span<const Candidate> candidates, const CostOf& cost_of) const {
  assert(!candidates.empty());
  size_t best = 0;
  double best_time = std::numeric_limits<double>::infinity();
  for (size_t n = 0; n < candidates.size(); ++n) {
    const int device = candidates[n].device;
    const int64_t cost = cost_of(loads_[device]) + BoundedCost(candidates[n].cost);
    const double time = static_cast<double>(cost) / speeds_[device];
    if (time < best_time) {
      best = n;
      best_time = time;
    }
  }
  return best;
}

size_t Router::Reserve(std::span<const Candidate> candidates) {
  const MutexLock lock(mutex_);
  const size_t best = BestLocked(candidates, [](const Load& load) { return load.outstanding; });
  loads_[candidates[best].device].outstanding += BoundedCost(candidates[best].cost);
  return best;
}

size_t Router::Expect(std::span<const Candidate> candidates) {
  const MutexLock lock(mutex_);
  const size_t best =
      BestLocked(candidates, [](const Load& load) { return load.outstanding + load.expected; });
  loads_[candidates[best].device].expected += BoundedCost(candidates[best].cost);
  return best;
}

void Router::Forget(int device, int64_t cost) {
  const MutexLock lock(mutex_);
  loads_[device].expected -= BoundedCost(cost);
  assert(loads_[device].expected >= 0);
}

void Router::Add(int device, int64_t cost) {
  const MutexLock lock(mutex_);
  loads_[device].outstanding += BoundedCost(cost);
}

void Router::Release(int device, int64_t cost) {
  const MutexLock lock(mutex_);
  loads_[device].outstanding -= BoundedCost(cost);
  assert(loads_[device].outstanding >= 0);
}

int64_t Router::outstanding(int device) const {
  const MutexLock lock(mutex_);
  return loads_[device].outstanding;
}

}  // namespace attend
