// SPDX-License-Identifier: Apache-2.0
//
// A token bucket: units per second, saved up to a burst. A charge is accepted in full while the
// level is not negative, even if that makes it negative. So one charge may exceed the burst, and
// the rate still holds, since the next charge waits until the debt is paid: in t seconds a bucket
// accepts at most burst + t * rate + one charge.
//
// Pure: time is an argument in whole nanoseconds and must not run backwards. Sums saturate at a
// century from now. Not thread-safe.

#pragma once

#include <cstdint>

#include "kernels/util/clock.h"

namespace attend {

struct Rate {
  int64_t per_second = 0;  // 0: unbounded
  int64_t burst = 0;       // at least 1 if there is a rate

  bool bounded() const { return per_second > 0; }
  bool operator==(const Rate&) const = default;
};

class TokenBucket {
 public:
  // Starts full.
  explicit TokenBucket(const Rate& rate = {}) : rate_(rate) {}

  // Time until a charge is accepted, not counting `own` units already charged; zero: now.
  Duration Wait(TimePoint now, int64_t own = 0) const;
  // `units`: at least 0.
  void Charge(int64_t units, TimePoint now);
  // Charges as much of `units` as the bucket holds, without debt. Returns the rest.
  int64_t ChargeWithoutDebt(int64_t units, TimePoint now);
  // Returns units that were charged and not used.
  void Return(int64_t units);
  // Units taken stay taken under the new rate, up to what is missing from a full bucket.
  void SetRate(const Rate& rate, TimePoint now);

  // Units missing from a full bucket; above the burst: the bucket is in debt by the difference.
  int64_t Missing(TimePoint now) const;
  const Rate& rate() const { return rate_; }

 private:
  // The time in which the rate yields `units`, rounded up.
  Duration TimeFor(int64_t units) const;

  Rate rate_;
  // When it is full again if nothing more is charged; in the past: it is full now.
  TimePoint full_at_ = TimePoint::min();
};

}  // namespace attend
