// SPDX-License-Identifier: Apache-2.0
//
// A measurement is a row of windows of the same length. They show its noise, and they say when it
// has become stable: when the last three agree. Pure: times come from outside.

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

// One window: requests that were meant for it, and answers that arrived in it.
struct WindowResult {
  double start_s = 0;  // from the beginning of the first window
  double elapsed_s = 0;
  int64_t ok = 0;     // answers that arrived in it
  Histogram latency;  // ns, from the intended send, of the requests that were meant for it

  double requests_per_s() const { return elapsed_s > 0 ? static_cast<double>(ok) / elapsed_s : 0; }
};

// How far windows are apart: the largest distance from their mean, in percent of it. Infinite if
// one of them has no answer.
struct WindowSpread {
  double rate_percent = std::numeric_limits<double>::infinity();
  double latency_percent = std::numeric_limits<double>::infinity();

  bool Within(double percent) const {
    return rate_percent <= percent && latency_percent <= percent;
  }
};
// Of the last kWindowsToAgree; infinite if there are fewer.
WindowSpread SpreadOf(const std::vector<WindowResult>& windows, double percentile);

// Where the windows are in time, and when there are enough of them.
class WindowPlan {
 public:
  // Windows of `window_ns` from begin_ns on: as many as a rule says, or `count` without one.
  WindowPlan(int64_t begin_ns, int64_t window_ns, int64_t count,
             const std::optional<StabilityRule>& rule);

  int64_t count_max() const { return count_max_; }
  int64_t BeginOf(int64_t window) const { return begin_ns_ + window * window_ns_; }
  // The window of a moment; the last one for what is later than all.
  int64_t IndexOf(int64_t ns) const;
  double window_s() const { return static_cast<double>(window_ns_) * 1e-9; }

  // The next window that is over and that Add was not given; none before its end, after the last
  // or once they agree.
  std::optional<int64_t> Ended(int64_t now_ns) const;
  void Add(WindowResult window);
  // All that were added.
  const std::vector<WindowResult>& windows() const { return windows_; }
  // The rule's verdict so far.
  bool stable() const { return stable_; }
  // No more windows are needed.
  bool done() const { return stable_ || static_cast<int64_t>(windows_.size()) == count_max_; }
  // The first of those that the report is about: of the last three with a rule, else all.
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
