// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/estimator.h"

#include <algorithm>
#include <cmath>

#include "server/util/thresholds.h"

namespace attend {
namespace {

// Below it, what a request takes has nothing to do with its cost.
constexpr double kCostLeast = 1024;

double CostOf(const Request& request) { return std::max(request.kernel_cost, kCostLeast); }

Duration Nanoseconds(double ns) {
  constexpr double kMost = 1e13;  // three hours; sums of many must not overflow
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(ns, kMost)));
}

}  // namespace

size_t Estimator::IndexOf(const Request& request) {
  const int size = std::clamp((std::ilogb(CostOf(request)) - 10) / 2, 0, kSizes - 1);
  const auto kernel = static_cast<size_t>(request.selection.kernel);
  return (kernel * 2 + (request.backward ? 1 : 0)) * kSizes + static_cast<size_t>(size);
}

Duration Estimator::Expect(const Request& request) const {
  return Nanoseconds(entries_[IndexOf(request)].ns_per_cost * CostOf(request));
}

bool Estimator::Try(const Request& request, bool idle, TimePoint now) {
  Entry& entry = entries_[IndexOf(request)];
  const Duration most = std::min(Expect(request), request.deadline - now);
  const Duration pause =
      idle ? most : std::max<Duration>(thresholds::kTryPauseLeast, thresholds::kTryPause * most);
  if (now - entry.renewed < pause) return false;
  entry.renewed = now;
  return true;
}

void Estimator::Learn(std::span<Request* const> batch, Duration took, TimePoint now) {
  double expected = 0, cost = 0;
  bool all_known = true, late = false;
  for (const Request* const request : batch) {
    const double ns_per_cost = entries_[IndexOf(*request)].ns_per_cost;
    all_known &= ns_per_cost > 0;
    if (request->stop.set() && request->stop_code != Code::kDeadlineExceeded) return;
    late |= request->stop.set();
    cost += CostOf(*request);
    expected += ns_per_cost * CostOf(*request);
  }
  double ns = static_cast<double>(std::chrono::nanoseconds(took).count());
  if (late) ns *= thresholds::kStoppedHalfway;
  if (ns <= 0 || batch.empty()) return;
  for (const Request* const request : batch) {
    Entry& entry = entries_[IndexOf(*request)];
    if (!all_known) {
      if (entry.ns_per_cost == 0) entry = {ns / cost, now};
      continue;
    }
    // All of the batch's requests together count as one observation. One that took less is
    // believed sooner, as work is often slower by accident and never faster, and at once if the
    // estimate had called it hopeless.
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
