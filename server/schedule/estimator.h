// SPDX-License-Identifier: Apache-2.0
//
// How long requests take on one device, learned from those that ran. Its unit is the device's own
// time: while n lanes are busy, each gets 1/n of it. So the times of what waits and runs add up to
// when the device will be done, however many lanes it has and however much they are in each other's
// way.
//
// An estimate is a time per kernel cost (kernels/contract/cost.h), by kernel, pass and size: small
// requests take longer for their cost. So a size that never ran is expected to take as long for its
// cost as the next larger one that is known. If only smaller ones are known, it takes as long as
// the least request of the largest of these, and no less than at the rate of the device, which
// alone counts where no size is known. No estimate is believed for ever: where one says that a
// request is hopeless, one such request in a while is tried all the same. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/util/clock.h"
#include "server/request/request.h"

namespace attend {

// How a batch ended.
enum class BatchEnd {
  kFailed,   // it says nothing of how long requests take
  kStopped,  // some of its requests were stopped
  kWhole,    // all ran to their end, whenever that was
};

class Estimator {
 public:
  // `cost_per_s`: what the device may do at best of kernel cost; 0: not known.
  explicit Estimator(double cost_per_s) : ns_per_cost_(cost_per_s > 0 ? 1e9 / cost_per_s : 0) {}

  // The device time that the request takes by itself; zero: unknown.
  Duration Expect(const Request& request) const;
  // Whether a request that would be refused because it takes too long may be tried all the same:
  // none of its kind was for a while, so that tries take a small share of the device's time, or
  // half of it while it is idle; or the last one was in vain with half of this one's time.
  bool MayTry(const Request& request, bool idle, TimePoint now) const;
  // A request that is tried begins.
  void Tried(const Request& request, TimePoint now);
  // A batch ended, and had so much of the device's time. One that was stopped by a deadline would
  // have taken longer: it counts as twice that.
  void Learn(std::span<Request* const> batch, BatchEnd end, Duration took, TimePoint now);

 private:
  struct Entry {
    double ns_per_cost = 0;  // 0: not known
    TimePoint renewed{};     // when one such request was last tried or had run
    Duration in_vain{0};     // the most that one had that was tried, unless one has run since
  };
  // Sizes differ by a factor of four.
  static constexpr int kSizes = 32;

  static size_t IndexOf(const Request& request);

  double ns_per_cost_;  // the device's rate; 0: not known
  std::array<Entry, static_cast<size_t>(kKernelCount) * 2 * kSizes> entries_{};
};

}  // namespace attend
