// SPDX-License-Identifier: Apache-2.0
//
// Predicts when work would be done on a device, given what is running. Lanes share the device
// evenly, as in estimator.h: each running batch gets an equal part of it until it ends. Everything
// ahead of a request is padded by a quarter, because estimates are right only on average. Pure.

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

  // A running batch: the device time it still needs, its earliest deadline, and its requests'
  // tenant and lowest priority. A large batch, or one of several tenants, has kNoTenant.
  struct Running {
    Duration left{0};
    TimePoint deadline = kNever;
    int tenant = kNoTenant;
    int32_t priority = 0;
  };

  // `running` must outlive it. `lane_free`: a batch could start at once.
  Outlook(std::span<const Running> running, bool lane_free, TimePoint now)
      : running_(running), now_(now) {
    if (lane_free || running.empty()) return;
    until_free_ = Duration::max();
    for (const Running& each : running) until_free_ = std::min(until_free_, each.left);
  }

  // When work of length `own` would be done behind work of length `ahead`, on a lane that starts
  // both now, or as soon as a lane is free. Both are device times.
  TimePoint End(Duration ahead, Duration own) const {
    const Duration bound = std::max(ahead + own, until_free_);
    for (const Running& each : running_) ahead += std::min(each.left, bound);
    return After(ahead, own);
  }
  // Whether a batch of `work` in total may contain `request`: no running batch of its tenant with
  // at least its priority that would meet its deadline may miss it because of this one. Batches of
  // other tenants and of lower priorities are not considered.
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
