// SPDX-License-Identifier: Apache-2.0
//
// Each (kernel, pass, size class) has one time per cost, moved towards every observation. A batch
// is a single observation: the ratio of its time to the sum of its requests' estimates, applied to
// each request by its share of that sum. Slower observations are capped and have a small gain,
// faster ones a large one, since noise only makes work slower. A batch stopped at a deadline gives
// a lower bound: it can raise an estimate, never lower it.

#include "server/schedule/estimator.h"

#include <algorithm>
#include <cmath>

#include "server/util/thresholds.h"

namespace attend {
namespace {

// Below this cost, the time of a request no longer depends on it.
constexpr double kCostLeast = 1024;

double CostOf(const Request& request) { return std::max(request.kernel_cost, kCostLeast); }

Duration Nanoseconds(double ns) {
  constexpr double kMost = 1e13;  // about three hours; sums of many must not overflow
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(ns, kMost)));
}

}  // namespace

size_t Estimator::IndexOf(const Request& request) {
  const int size = std::clamp((std::ilogb(CostOf(request)) - 10) / 2, 0, kSizes - 1);
  const auto kernel = static_cast<size_t>(request.selection.kernel);
  return (kernel * 2 + (request.backward ? 1 : 0)) * kSizes + static_cast<size_t>(size);
}

Duration Estimator::Expect(const Request& request) const {
  const size_t index = IndexOf(request);
  const double cost = CostOf(request);
  if (entries_[index].ns_per_cost > 0) return Nanoseconds(entries_[index].ns_per_cost * cost);
  const size_t first = index / kSizes * kSizes;
  for (size_t larger = index + 1; larger < first + kSizes; ++larger) {
    if (entries_[larger].ns_per_cost > 0) return Nanoseconds(entries_[larger].ns_per_cost * cost);
  }
  for (size_t smaller = index; smaller-- > first;) {
    const double least = std::ldexp(kCostLeast, 2 * static_cast<int>(smaller - first));
    if (entries_[smaller].ns_per_cost > 0) {
      return Nanoseconds(std::max(entries_[smaller].ns_per_cost * least, ns_per_cost_ * cost));
    }
  }
  return Nanoseconds(ns_per_cost_ * cost);
}

bool Estimator::MayTry(const Request& request, bool idle, TimePoint now) const {
  const Entry& entry = entries_[IndexOf(request)];
  const Duration left = request.deadline - now;
  if (entry.in_vain > Duration::zero() && left / 2 >= entry.in_vain) return true;
  const Duration most = std::max(entry.in_vain, std::min(Expect(request), left));
  return now - entry.renewed >=
         (idle ? most
               : std::max<Duration>(thresholds::kTryPauseLeast, thresholds::kTryPause * most));
}

void Estimator::Tried(const Request& request, TimePoint now) {
  Entry& entry = entries_[IndexOf(request)];
  entry.renewed = now;
  entry.in_vain = std::max(entry.in_vain, request.deadline - now);
}

void Estimator::Learn(std::span<Request* const> batch, BatchEnd end, Duration took, TimePoint now) {
  if (end == BatchEnd::kFailed) return;
  const bool late = end == BatchEnd::kStopped;
  double expected = 0, cost = 0;
  bool all_known = true;
  for (const Request* const request : batch) {
    const double ns_per_cost = entries_[IndexOf(*request)].ns_per_cost;
    all_known &= ns_per_cost > 0;
    if (late && request->stop.set() && request->stop_code != Code::kDeadlineExceeded) return;
    cost += CostOf(*request);
    expected += ns_per_cost * CostOf(*request);
  }
  double ns = static_cast<double>(std::chrono::nanoseconds(took).count());
  if (late) ns *= thresholds::kStoppedHalfway;
  if (ns <= 0 || batch.empty()) return;
  for (const Request* const request : batch) {
    Entry& entry = entries_[IndexOf(*request)];
    // A probe that ran to completion, but after its deadline, failed too.
    if (!late) entry.in_vain = request->tried && now > request->deadline ? took : Duration::zero();
    if (!all_known) {
      if (entry.ns_per_cost == 0) {
        entry.ns_per_cost = ns / cost;
        entry.renewed = now;
      }
      continue;
    }
    // The whole batch is one observation. A faster one is trusted sooner, because work is often
    // slower by accident but never faster; and at once if the estimate had called the request
    // hopeless.
    const double ratio = std::min(ns / expected, thresholds::kSlowerMost);
    if (late && ratio <= 1) continue;
    const double gain = ratio > 1        ? thresholds::kSlowerGain
                        : request->tried ? 1
                                         : thresholds::kFasterGain;
    const double share = entry.ns_per_cost * CostOf(*request) / expected;
    entry.ns_per_cost *= 1 + gain * std::min(share, 1.0) * (ratio - 1);
    entry.renewed = now;
  }
}

}  // namespace attend
