// SPDX-License-Identifier: Apache-2.0

#include "client/load/windows.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attend::client {
namespace {

double Spread(const std::vector<double>& values) {
  double mean = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  if (!(mean > 0)) return std::numeric_limits<double>::infinity();
  double apart = 0;
  for (const double value : values) apart = std::max(apart, std::abs(value - mean));
  return 100 * apart / mean;
}

}  // namespace

WindowSpread SpreadOf(const std::vector<WindowResult>& windows, double percentile) {
  WindowSpread spread;
  if (static_cast<int64_t>(windows.size()) < kWindowsToAgree) return spread;
  std::vector<double> rates, latencies;
  for (auto window = windows.end() - kWindowsToAgree; window != windows.end(); ++window) {
    if (window->ok == 0 || window->latency.count() == 0) return spread;
    rates.push_back(window->requests_per_s());
    latencies.push_back(static_cast<double>(window->latency.ValueAt(percentile / 100)));
  }
  spread.rate_percent = Spread(rates);
  spread.latency_percent = Spread(latencies);
  return spread;
}

WindowPlan::WindowPlan(int64_t begin_ns, int64_t window_ns, int64_t count,
                       const std::optional<StabilityRule>& rule)
    : begin_ns_(begin_ns),
      window_ns_(window_ns),
      count_max_(rule ? rule->windows_max : count),
      rule_(rule) {}

int64_t WindowPlan::IndexOf(int64_t ns) const {
  return std::clamp<int64_t>((ns - begin_ns_) / window_ns_, 0, count_max_ - 1);
}

std::optional<int64_t> WindowPlan::Ended(int64_t now_ns) const {
  const auto next = static_cast<int64_t>(windows_.size());
  if (done() || now_ns < BeginOf(next + 1)) return std::nullopt;
  return next;
}

void WindowPlan::Add(WindowResult window) {
  windows_.push_back(std::move(window));
  stable_ = rule_ && SpreadOf(windows_, rule_->percentile).Within(rule_->percent);
}

int64_t WindowPlan::first_reported() const {
  if (!rule_) return 0;
  return std::max<int64_t>(0, static_cast<int64_t>(windows_.size()) - kWindowsToAgree);
}

}  // namespace attend::client
