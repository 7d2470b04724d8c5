// SPDX-License-Identifier: Apache-2.0
//
// Estimates how long requests take on one device, learned from those that ran. The unit is device
// time: while n lanes are busy, each is credited 1/n of the elapsed time. So the estimates of all
// that waits and runs add up to when the device will be done, however many lanes it has and however
// much they slow each other down.
//
// An estimate is a time per kernel cost (kernels/contract/cost.h), by kernel, pass and size class,
// because small requests take longer for their cost. A size class without an estimate uses that of
// the next larger class that has one. If only smaller classes have one, the estimate is the time of
// the smallest request in the largest of them, but at least the cost at the device's rate. Without
// any estimate, the device's rate alone is used. No estimate is trusted forever: if it calls a
// request hopeless, one such request is run as a probe every so often. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/util/clock.h"
#include "server/request/request.h"

namespace attend {

// How a batch ended.
enum class BatchEnd {
  kFailed,   // failed: says nothing about how long requests take
  kStopped,  // some of its requests were stopped
  kWhole,    // all ran to completion, in time or not
};

class Estimator {
 public:
  // `cost_per_s`: the device's peak rate in kernel cost; 0: unknown.
  explicit Estimator(double cost_per_s) : ns_per_cost_(cost_per_s > 0 ? 1e9 / cost_per_s : 0) {}

  // The device time of the request alone; zero: unknown.
  Duration Expect(const Request& request) const;
  // Whether a request that would be refused as too slow may run as a probe. True if the last probe
  // or run of its kind is long enough ago, so that probes take a small share of the device's time,
  // or half of it while it is idle; or if the last probe failed with at most half of this request's
  // time.
  bool MayTry(const Request& request, bool idle, TimePoint now) const;
  // Call when a probe starts.
  void Tried(const Request& request, TimePoint now);
  // Call when a batch ended after `took` of device time. If a deadline stopped it, it would have
  // taken longer: the time counts twice.
  void Learn(std::span<Request* const> batch, BatchEnd end, Duration took, TimePoint now);

 private:
  struct Entry {
    double ns_per_cost = 0;  // 0: unknown
    TimePoint renewed{};     // when such a request last ran or was probed
    Duration in_vain{0};     // the longest time at which a probe failed since the last success
  };
  // Size classes are a factor of four apart.
  static constexpr int kSizes = 32;

  static size_t IndexOf(const Request& request);

  double ns_per_cost_;  // the device's rate; 0: unknown
  std::array<Entry, static_cast<size_t>(kKernelCount) * 2 * kSizes> entries_{};
};

}  // namespace attend
