// SPDX-License-Identifier: Apache-2.0
//
// A measurement is a sequence of windows of equal length. They show its noise, and when it has
// become stable: when the last three agree. Pure: times come from the caller.

#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "client/load/histogram.h"

namespace attend::client {

// As perf_analyzer's --stability-percentage, --percentile and --max-trials.
struct StabilityRule {
  double percent = 10;
  double percentile = 95;
  int64_t windows_max = 10;
};
inline constexpr int64_t kWindowsToAgree = 3;

// One window: requests intended for it, and answers that arrived in it.
struct WindowResult {
  double start_s = 0;  // from the first window's begin
  double elapsed_s = 0;
  int64_t ok = 0;     // answers that arrived in it
  Histogram latency;  // ns, from the intended send, of requests intended for it

  double requests_per_s() const { return elapsed_s > 0 ? static_cast<double>(ok) / elapsed_s : 0; }
};

// Spread of windows: the largest distance from their mean, in percent of it. Infinite if one has no
// answer.
struct WindowSpread {
  double rate_percent = std::numeric_limits<double>::infinity();
  double latency_percent = std::numeric_limits<double>::infinity();

  bool Within(double percent) const {
    return rate_percent <= percent && latency_percent <= percent;
  }
};
// Spread of the last kWindowsToAgree; infinite if there are fewer.
WindowSpread SpreadOf(const std::vector<WindowResult>& windows, double percentile);

// The windows' times, and when there are enough windows.
class WindowPlan {
 public:
  // Windows of `window_ns` from begin_ns on: at most the rule's number, or `count` without a rule.
  WindowPlan(int64_t begin_ns, int64_t window_ns, int64_t count,
             const std::optional<StabilityRule>& rule);

  int64_t count_max() const { return count_max_; }
  int64_t BeginOf(int64_t window) const { return begin_ns_ + window * window_ns_; }
  // The window at this time; later times belong to the last one.
  int64_t IndexOf(int64_t ns) const;
  double window_s() const { return static_cast<double>(window_ns_) * 1e-9; }

  // The next window that has ended and was not added; none before its end, after the last, or once
  // they agree.
  std::optional<int64_t> Ended(int64_t now_ns) const;
  void Add(WindowResult window);
  // The added windows.
  const std::vector<WindowResult>& windows() const { return windows_; }
  // The rule's verdict so far.
  bool stable() const { return stable_; }
  // No more windows are needed.
  bool done() const { return stable_ || static_cast<int64_t>(windows_.size()) == count_max_; }
  // The first reported window: of the last three with a rule, else of all.
  int64_t first_reported() const;
  const std::optional<StabilityRule>& rule() const { return rule_; }

 private:
  int64_t begin_ns_;
  int64_t window_ns_;
  int64_t count_max_;
  std::optional<StabilityRule> rule_;
  std::vector<WindowResult> windows_;
  bool stable_ = false;
};

}  // namespace attend::client
