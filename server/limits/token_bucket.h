// SPDX-License-Identifier: Apache-2.0
//
// So many units a second, saved up to a burst. A charge is taken while the bucket is not below
// zero, and then in full, even if that puts it below: so a charge that is larger than the burst is
// possible, and the rate holds all the same, since the next one waits until the debt is paid. In t
// seconds a bucket takes no more than burst + t * rate + one charge.
//
// Pure: time is an argument, whole nanoseconds, and may not run backwards. Sums saturate decades
// from now. Not thread-safe.

#pragma once

#include <cstdint>

#include "kernels/util/clock.h"

namespace attend {

struct Rate {
  int64_t per_second = 0;  // 0: no bound
  int64_t burst = 0;       // at least 1 where there is a bound

  bool bounded() const { return per_second > 0; }
  bool operator==(const Rate&) const = default;
};

class TokenBucket {
 public:
  // Begins full.
  explicit TokenBucket(const Rate& rate = {}) : rate_(rate) {}

  // How long until a charge is taken, apart from `own` units that were charged; zero: now.
  Duration Wait(TimePoint now, int64_t own = 0) const;
  // `units`: 0 or more.
  void Charge(int64_t units, TimePoint now);
  // Charges what the bucket has of `units`, so that they put it into no debt. Returns the rest.
  int64_t ChargeWithoutDebt(int64_t units, TimePoint now);
  // Gives back what was charged and not used.
  void Return(int64_t units);
  // What has been taken stays taken, but at most as much of it as is missing from a full bucket.
  void SetRate(const Rate& rate, TimePoint now);

  // Units that are missing from a full bucket; above the burst: what it is below zero.
  int64_t Missing(TimePoint now) const;
  const Rate& rate() const { return rate_; }

 private:
  // The time in which the rate brings so many units, rounded up.
  Duration TimeFor(int64_t units) const;

  Rate rate_;
  TimePoint full_at_ = TimePoint::min();  // if nothing more is charged; the past: it is full
};

}  // namespace attend
