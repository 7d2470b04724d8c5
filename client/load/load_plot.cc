// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_plot.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <numeric>

namespace attend::client {
namespace {

constexpr size_t kHistogramsMax = 6;  // more lines cannot be told apart

struct Percentile {
  const char* name;
  double LatencyFigures::*value;
  int64_t answers_min;  // the percentile of fewer answers is their maximum
};
constexpr Percentile kPercentiles[] = {{"p50", &LatencyFigures::p50_ms, 2},
                                       {"p90", &LatencyFigures::p90_ms, 10},
                                       {"p99", &LatencyFigures::p99_ms, 100},
                                       {"p99.9", &LatencyFigures::p999_ms, 1000}};
constexpr Percentile kMaximum = {"max", &LatencyFigures::max_ms, 1};

bool IsOpen(const LoadFile& file) {
  return std::all_of(file.steps.begin(), file.steps.end(),
                     [](const FileStep& step) { return step.step.open(); });
}

double OfferedOf(const LoadStep& step) {
  return step.open() ? step.rate_per_s : static_cast<double>(step.concurrency);
}

// "x8" or "500/s".
std::string ShortName(const LoadStep& step) {
  return step.open() ? RateText(step.rate_per_s) + "/s" : "x" + std::to_string(step.concurrency);
}

std::vector<FileStep> Answered(const LoadFile& file) {
  std::vector<FileStep> steps;
  std::copy_if(file.steps.begin(), file.steps.end(), std::back_inserter(steps),
               [](const FileStep& step) { return step.latency.count > 0; });
  return steps;
}

// Percentiles that measurements of at least `answers` answers have, and the maximum in place of
// those that they lack.
std::vector<Percentile> PercentilesOf(int64_t answers) {
  std::vector<Percentile> drawn;
  for (const Percentile& percentile : kPercentiles) {
    if (answers >= percentile.answers_min) drawn.push_back(percentile);
  }
  if (drawn.size() < std::size(kPercentiles)) drawn.push_back(kMaximum);
  return drawn;
}

// One value for each window that the step reports and that has at least so many answers.
std::vector<double> OfWindows(const FileStep& step, int64_t answers_min,
                              const std::function<double(const FileWindow&)>& of) {
  std::vector<double> values;
  for (const FileWindow& window : step.windows) {
    if (window.reported && window.latency.count >= answers_min) values.push_back(of(window));
  }
  return values;
}

Series LatencySeries(const std::vector<FileStep>& steps, const Percentile& percentile,
                     const std::string& name) {
  Series series{name, {}};
  for (const FileStep& step : steps) {
    series.points.push_back({step.requests_per_s, step.latency.*percentile.value});
    series.ranges.push_back(OfWindows(
        step, percentile.answers_min,
        [&percentile](const FileWindow& window) { return window.latency.*percentile.value; }));
  }
  return series;
}

LineChart LatencyOverRate(const std::vector<FileStep>& steps) {
  LineChart chart{"Latency against rate", "requests/s answered", "latency, ms", false, true, {}};
  int64_t answers = INT64_MAX;
  for (const FileStep& step : steps) answers = std::min(answers, step.latency.count);
  for (const Percentile& percentile : PercentilesOf(answers)) {
    chart.series.push_back(LatencySeries(steps, percentile, percentile.name));
  }
  for (const FileStep& step : steps) {
    chart.series.back().labels.push_back(ShortName(step.step));
  }
  return chart;
}

Series RateSeries(const std::vector<FileStep>& steps, const std::string& name) {
  Series series{name, {}};
  for (const FileStep& step : steps) {
    series.points.push_back({OfferedOf(step.step), step.requests_per_s});
    series.ranges.push_back(
        OfWindows(step, 0, [](const FileWindow& window) { return window.requests_per_s; }));
  }
  return series;
}

LineChart RateOverLoad(const std::vector<FileStep>& steps, bool open) {
  const char* offered = open ? "requests/s offered" : "callers, each with one request in flight";
  LineChart chart{"Throughput", offered, "requests/s", true, false, {}};
  chart.series = {RateSeries(steps, "answered, and its windows' range")};
  for (const Point& point : chart.series[0].points) chart.x_ticks.push_back(point.x);
  return chart;
}

// With deadlines: answers in time, refused and late. Steps without an answer are included.
LineChart GoodputOverLoad(const LoadFile& file) {
  const char* offered =
      IsOpen(file) ? "requests/s offered" : "callers, each with one request in flight";
  LineChart chart{"Goodput, deadlines of " + file.Setting("options.deadline_ms") + " ms",
                  offered,
                  "requests/s",
                  true,
                  false,
                  {}};
  Series refused{"refused", {}}, late{"too late", {}};
  for (const FileStep& step : file.steps) {
    const double x = OfferedOf(step.step);
    chart.x_ticks.push_back(x);
    refused.points.push_back({x, step.refused_per_s});
    late.points.push_back({x, step.late_per_s});
  }
  chart.series = {RateSeries(file.steps, "in time"), refused, late};
  return chart;
}

bool HasDeadlines(const LoadFile& file) {
  const std::string& deadline = file.Setting("options.deadline_ms");
  return !deadline.empty() && deadline.find_first_not_of("0.") != std::string::npos;
}

double MiddleOf(const FileWindow& window) { return window.start_s + window.elapsed_s / 2; }

LineChart LatencyOverTime(const FileStep& step) {
  LineChart chart{"Latency by window", "time, s", "latency, ms", false, true, {}};
  int64_t answers = INT64_MAX;
  for (const FileWindow& window : step.windows) answers = std::min(answers, window.latency.count);
  for (const Percentile& percentile : PercentilesOf(answers)) {
    Series series{percentile.name, {}};
    for (const FileWindow& window : step.windows) {
      series.points.push_back({MiddleOf(window), window.latency.*percentile.value});
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

LineChart RateOverTime(const FileStep& step) {
  LineChart chart{"Throughput by window", "time, s", "requests/s", false, false, {}};
  Series series{"answered", {}};
  for (const FileWindow& window : step.windows) {
    series.points.push_back({MiddleOf(window), window.requests_per_s});
  }
  chart.series.push_back(std::move(series));
  return chart;
}

BarChart Phases(const std::vector<FileStep>& steps) {
  BarChart chart{"Where the time goes", "mean time of a call, ms", "ms", BarPhases(), {}};
  for (const FileStep& step : steps) {
    chart.rows.push_back({ShortName(step.step), BarParts(step.phase_mean_ms)});
  }
  return chart;
}

// A step curve whose height is the share of each bucket.
Series HistogramSeries(const FileStep& step) {
  Series series{ShortName(step.step), {}, {}, /*bare=*/true};
  for (const FileBucket& bucket : step.histogram) {
    const double share =
        100 * static_cast<double>(bucket.count) / static_cast<double>(step.latency.count);
    if (series.points.empty() || series.points.back().x < bucket.lower_ms * 0.999) {
      if (!series.points.empty()) series.points.push_back({series.points.back().x, 0});
      series.points.push_back({bucket.lower_ms, 0});
    }
    series.points.push_back({bucket.lower_ms, share});
    series.points.push_back({bucket.upper_ms, share});
  }
  if (!series.points.empty()) series.points.push_back({series.points.back().x, 0});
  return series;
}

LineChart Histograms(const std::vector<FileStep>& steps) {
  LineChart chart{
      "Histogram of latencies", "latency, ms", "% of calls in a bucket", true, false, {}};
  const size_t shown = std::min(steps.size(), kHistogramsMax);
  for (size_t i = 0; i < shown; ++i) {  // evenly spread, with the first and the last
    const size_t at = shown == 1 ? 0 : i * (steps.size() - 1) / (shown - 1);
    chart.series.push_back(HistogramSeries(steps[at]));
  }
  return chart;
}

std::string Shortened(const std::string& text, size_t length) {
  return text.size() <= length ? text : text.substr(0, length - 3) + "...";
}

}  // namespace

std::vector<std::string> BarPhases() {
  return {"receive",           "queue", "copy in", "kernel", "copy out", "rest of the server",
          "network and client"};
}

std::vector<double> BarParts(const std::array<double, kPhases>& phase_mean_ms) {
  std::vector<double> parts;
  for (const Phase phase : {kReceive, kQueue, kCopyIn, kKernel, kCopyOut}) {
    parts.push_back(phase_mean_ms[phase]);
  }
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  const double total = phase_mean_ms[kTotal];
  if (sum > total) {
    for (double& part : parts) part *= total / sum;
  }
  parts.push_back(std::max(0.0, total - sum));
  parts.push_back(phase_mean_ms[kNetwork]);
  return parts;
}

Figure LoadFigure(const LoadFile& file) {
  const std::vector<FileStep> steps = Answered(file);
  Figure figure;
  figure.title = "attend-client load, " + std::string(IsOpen(file) ? "open loop" : "closed loop");
  figure.subtitle = {
      Shortened(file.shapes, 120),
      Shortened(file.Setting("devices") + ", " + file.Setting("transport") + ", " +
                    file.Setting("connections") +
                    (file.Setting("connections") == "1" ? " connection" : " connections") +
                    ", attend " + file.Setting("server version") + ", " + file.Setting("started"),
                130)};
  if (HasDeadlines(file) && file.steps.size() > 1) {
    figure.panels = {LatencyOverRate(steps), GoodputOverLoad(file)};
  } else if (steps.size() == 1) {
    figure.panels = {LatencyOverTime(steps[0]), RateOverTime(steps[0])};
  } else {
    figure.panels = {LatencyOverRate(steps), RateOverLoad(steps, IsOpen(file))};
  }
  figure.panels.emplace_back(Phases(steps));
  figure.panels.emplace_back(Histograms(steps));
  return figure;
}

Figure ComparisonFigure(const std::vector<LoadFile>& files) {
  Figure figure;
  figure.title = "attend-client compare";
  LineChart latency{"Latency against rate", "requests/s answered", "latency, ms", false, true, {}};
  const bool open = IsOpen(files.front());
  LineChart rate{
      "Throughput", open ? "requests/s offered" : "callers", "requests/s", true, false, {}};
  for (const LoadFile& file : files) {
    const std::vector<FileStep> steps = Answered(file);
    const std::string name = std::filesystem::path(file.name).filename();
    for (const size_t n : files.size() > 2 ? std::vector<size_t>{0} : std::vector<size_t>{0, 2}) {
      latency.series.push_back(
          LatencySeries(steps, kPercentiles[n], name + " " + kPercentiles[n].name));
    }
    rate.series.push_back(RateSeries(steps, name));
    figure.subtitle.push_back(name + ": " + Shortened(file.shapes, 80) + ", " +
                              file.Setting("transport") + ", " + file.Setting("started"));
  }
  figure.panels = {latency, rate};
  return figure;
}

}  // namespace attend::client
