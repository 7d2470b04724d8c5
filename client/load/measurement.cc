// SPDX-License-Identifier: Apache-2.0

#include "client/load/measurement.h"

#include <algorithm>

namespace attend::client {
namespace {

// Windows of a measurement without a rule, which show its noise.
constexpr int64_t kWindows = 5;

double Seconds(int64_t ns) { return static_cast<double>(std::max<int64_t>(0, ns)) * 1e-9; }

// A request count makes one window without an end.
WindowPlan MakePlan(const LoadOptions& options, int64_t begin_ns) {
  if (options.count > 0) return {begin_ns, INT64_MAX / 4, 1, std::nullopt};
  const double window_s = options.stability ? options.duration_s : options.duration_s / kWindows;
  const auto window_ns = static_cast<int64_t>(window_s * 1e9);
  return {begin_ns, std::max<int64_t>(1, window_ns), kWindows, options.stability};
}

}  // namespace

Measurement::Measurement(const LoadOptions& options, int connections, int64_t begin_ns)
    : options_(options),
      plan_(MakePlan(options, begin_ns)),
      due_in_(static_cast<size_t>(plan_.count_max())),
      end_ns_(options.count > 0 ? INT64_MAX : plan_.BeginOf(plan_.count_max())) {
  for (int i = 0; i < connections; ++i) recorders_.push_back(std::make_unique<LoadRecorder>());
}

WindowResult Measurement::WindowAt(int64_t index) const {
  LoadStats stats = Merged(recorders_, index, index);
  WindowResult window;
  window.start_s = Seconds(plan_.BeginOf(index) - begin_ns());
  window.elapsed_s = plan_.window_s();
  window.ok = stats.window_ok;
  window.latency = std::move(stats.from_intended);
  return window;
}

void Measurement::Judge(int64_t now_ns) {
  while (const std::optional<int64_t> ended = plan_.Ended(now_ns)) {
    plan_.Add(WindowAt(*ended));
    if (!options_.stability) continue;
    first_reported_ = plan_.first_reported();
    // The next window is the last of the three that may be reported next.
    MergeEarlier(recorders_, *ended + (plan_.done() ? 1 : 2) - kWindowsToAgree);
  }
  const auto judged = static_cast<int64_t>(plan_.windows().size());
  if (plan_.done()) end_ns_ = std::min(end_ns_.load(), plan_.BeginOf(judged));
}

void Measurement::Interrupt(int64_t now_ns) { end_ns_ = std::min(end_ns_.load(), now_ns); }

void Measurement::Fill(int64_t last_answer_ns, LoadResult* result) {
  const int64_t end_ns = end_ns_ == INT64_MAX ? last_answer_ns : end_ns_.load();
  const int64_t first = first_reported_;
  result->windows = plan_.windows();
  auto count = static_cast<int64_t>(result->windows.size());
  for (int64_t i = first; i < count; ++i) {
    result->windows[static_cast<size_t>(i)] = WindowAt(i);  // now with late answers
  }
  const int64_t rest_ns = end_ns - plan_.BeginOf(count);
  if (count == 0 || (rest_ns > 0 && !plan_.done())) {  // it ended inside a window
    result->windows.push_back(WindowAt(count++));
    result->windows.back().elapsed_s = Seconds(rest_ns);
  }
  result->first_reported = first;
  result->earlier = MergeEarlier(recorders_, first);
  result->stats = Merged(recorders_, first, count - 1);
  result->elapsed_s = Seconds(end_ns - plan_.BeginOf(first));
  result->due = result->due_unsent;
  for (int64_t i = first; i < std::min(count, plan_.count_max()); ++i) {
    result->due += due_in_[static_cast<size_t>(i)];
  }
  result->stable = plan_.stable();
  if (options_.stability) {
    result->spread = SpreadOf(plan_.windows(), options_.stability->percentile);
  }
}

}  // namespace attend::client
