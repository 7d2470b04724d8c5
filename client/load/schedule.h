// SPDX-License-Identifier: Apache-2.0
//
// The intended send times of an open-loop load. Pure: the same seed gives the same times.

#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>

#include "client/call/random.h"

namespace attend::client {

enum class Arrivals { kPoisson, kConstant };

class Schedule {
 public:
  // `rate` in requests per second, above 0.
  Schedule(Arrivals arrivals, double rate, uint64_t seed)
      : arrivals_(arrivals), mean_gap_ns_(1e9 / rate), random_(seed) {
    assert(rate > 0);
  }

  // Nanoseconds from the start to the next request; non-decreasing. The first is one gap after 0.
  int64_t NextNs() {
    // Summed in double, so that gaps below a nanosecond are not lost.
    at_ns_ += arrivals_ == Arrivals::kPoisson ? mean_gap_ns_ * random_.Exponential() : mean_gap_ns_;
    return static_cast<int64_t>(at_ns_);
  }

  // The number of future sends in [from_ns, to_ns); draws past to_ns. Beyond ten million it is
  // estimated from the rate.
  int64_t CountWithin(int64_t from_ns, int64_t to_ns) {
    constexpr int kDrawnMax = 10'000'000;
    int64_t count = 0;
    for (int drawn = 0; drawn < kDrawnMax; ++drawn) {
      const int64_t at = NextNs();
      if (at >= to_ns) return count;
      count += at >= from_ns;
    }
    const double begin = std::max(at_ns_, static_cast<double>(from_ns));
    return count + static_cast<int64_t>((static_cast<double>(to_ns) - begin) / mean_gap_ns_);
  }

 private:
  Arrivals arrivals_;
  double mean_gap_ns_;
  Random random_;
  double at_ns_ = 0;
};

}  // namespace attend::client
