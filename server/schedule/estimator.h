// SPDX-License-Identifier: Apache-2.0
//
// How long requests take on one device, learned from those that ran. Its unit is the device's own
// time: while n lanes are busy, each gets 1/n of it. So the times of what waits and runs add up to
// when the device will be done, however many lanes it has and however much they are in each other's
// way.
//
// An estimate is a time per kernel cost (kernels/contract/cost.h), by kernel, pass and size: small
// requests take longer for their cost. A size that never ran has none, and is refused nothing. No
// estimate is believed for ever: where one says that a request is hopeless, one such request in a
// while is tried all the same. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/util/clock.h"
#include "server/request/request.h"

namespace attend {

class Estimator {
 public:
  // The device time that the request takes by itself; zero: unknown.
  Duration Expect(const Request& request) const;
  // Whether a request that would be refused because it takes too long is to be tried all the same.
  // If so, none of its kind is for a while: tries take a small share of the device's time, or half
  // of it while it is idle.
  bool Try(const Request& request, bool idle, TimePoint now);
  // A batch ran, and had so much of the device's time. One that was stopped by a deadline would
  // have taken longer: it counts as twice that.
  void Learn(std::span<Request* const> batch, Duration took, TimePoint now);

 private:
  struct Entry {
    double ns_per_cost = 0;  // 0: not known
    TimePoint renewed{};     // when one such request was last tried or had run
  };
  // Sizes differ by a factor of four.
  static constexpr int kSizes = 32;

  static size_t IndexOf(const Request& request);

  std::array<Entry, static_cast<size_t>(kKernelCount) * 2 * kSizes> entries_{};
};

}  // namespace attend
