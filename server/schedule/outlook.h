// SPDX-License-Identifier: Apache-2.0
//
// When a device would be done with something, beside what it runs. Lanes share it evenly, as
// estimator.h counts: each has as much of it as the others until its batch ends. To what lies
// between a request and its own time a reserve of a quarter is added: an expectation is right on
// average only. Pure.

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/util/clock.h"
#include "server/request/request.h"
#include "server/util/thresholds.h"

namespace attend {

class Outlook {
 public:
  static constexpr int kNoTenant = -1;

  // A batch that runs: device time that it still needs, the earliest deadline in it, and the tenant
  // and the lowest priority of its requests. A large one, or one of several tenants, has kNoTenant.
  struct Running {
    Duration left{0};
    TimePoint deadline = kNever;
    int tenant = kNoTenant;
    int32_t priority = 0;
  };

  // `running` must outlive it. `lane_free`: something could start at once.
  Outlook(std::span<const Running> running, bool lane_free, TimePoint now)
      : running_(running), now_(now) {
    if (lane_free || running.empty()) return;
    until_free_ = Duration::max();
    for (const Running& each : running) until_free_ = std::min(until_free_, each.left);
  }

  // When something that takes `own` is done if it comes after `ahead`, and a lane begins with both
  // now, or as soon as one is free. Times are the device's.
  TimePoint End(Duration ahead, Duration own) const {
    const Duration bound = std::max(ahead + own, until_free_);
    for (const Running& each : running_) ahead += std::min(each.left, bound);
    return After(ahead, own);
  }
  // Whether a batch of `work` in all may begin with `request`, or go on with it: what runs of its
  // tenant, with no lower priority, would be in time, and still is beside it. Other tenants and
  // higher priorities wait for no batch but their own.
  bool Spares(const Request& request, Duration work) const {
    for (const Running& one : running_) {
      if (one.deadline == kNever || one.tenant != request.tenant) continue;
      if (one.priority < request.priority) continue;
      Duration others = -one.left;
      for (const Running& each : running_) others += std::min(each.left, one.left);
      const Duration more = others + std::min(work, one.left);
      if (After(others, one.left) <= one.deadline && After(more, one.left) > one.deadline) {
        return false;
      }
    }
    return true;
  }

 private:
  TimePoint After(Duration others, Duration own) const {
    const Duration sum = others + others / thresholds::kExpectedReserve + own;
    return now_ + std::min(sum, (kNever - now_) / 2);
  }

  const std::span<const Running> running_;
  const TimePoint now_;
  Duration until_free_ = Duration::zero();
};

}  // namespace attend
