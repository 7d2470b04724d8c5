// SPDX-License-Identifier: Apache-2.0
//
// The virtual-scheduling form of a token bucket (GCRA): the only state is full_at_. A charge moves
// it forward, the units missing are (full_at_ - now) * rate, and nothing has to be refilled. The
// bucket is in debt while full_at_ - now exceeds the time that the rate takes for a burst.

#include "server/limits/token_bucket.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <limits>

namespace attend {
namespace {

using std::chrono::nanoseconds;
// Products of units and nanoseconds have up to 126 bits.
__extension__ using Wide = __int128;

constexpr int64_t kSecond = 1'000'000'000;
// Bound of full_at_ - now. A century is as good as never, and sums stay far from overflow.
constexpr nanoseconds kFurthest = std::chrono::hours(24 * 365 * 100);

int64_t Saturated(Wide value, int64_t most) {
  return value < most ? static_cast<int64_t>(value) : most;
}

}  // namespace

Duration TokenBucket::TimeFor(int64_t units) const {
  const Wide time = (Wide(units) * kSecond + rate_.per_second - 1) / rate_.per_second;
  return nanoseconds(Saturated(time, kFurthest.count()));
}

Duration TokenBucket::Wait(TimePoint now, int64_t own) const {
  if (!rate_.bounded() || full_at_ <= now) return Duration::zero();
  return std::max(Duration::zero(), full_at_ - now - TimeFor(rate_.burst) - TimeFor(own));
}

void TokenBucket::Charge(int64_t units, TimePoint now) {
  assert(units >= 0);
  if (!rate_.bounded()) return;
  full_at_ = std::min(std::max(full_at_, now) + TimeFor(units), now + kFurthest);
}

int64_t TokenBucket::ChargeWithoutDebt(int64_t units, TimePoint now) {
  assert(units >= 0);
  if (!rate_.bounded()) return 0;
  const TimePoint full_at = std::max(full_at_, now);
  const Duration left = std::max(Duration::zero(), now + TimeFor(rate_.burst) - full_at);
  const Duration wanted = TimeFor(units);
  full_at_ = full_at + std::min(left, wanted);
  if (wanted <= left) return 0;
  return units - static_cast<int64_t>(Wide(left.count()) * rate_.per_second / kSecond);
}

void TokenBucket::Return(int64_t units) {
  assert(units >= 0);
  // full_at_ starts at TimePoint::min(); before the clock's epoch the bucket is full already.
  if (rate_.bounded() && full_at_ > TimePoint()) full_at_ -= TimeFor(units);
}

int64_t TokenBucket::Missing(TimePoint now) const {
  if (!rate_.bounded() || full_at_ <= now) return 0;
  const Wide time = nanoseconds(full_at_ - now).count();
  return Saturated(time * rate_.per_second / kSecond, std::numeric_limits<int64_t>::max());
}

void TokenBucket::SetRate(const Rate& rate, TimePoint now) {
  if (rate == rate_) return;
  const int64_t missing = Missing(now);
  rate_ = rate;
  full_at_ = TimePoint::min();
  if (missing > 0) Charge(missing, now);
}

}  // namespace attend
