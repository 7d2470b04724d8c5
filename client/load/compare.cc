// SPDX-License-Identifier: Apache-2.0

#include "client/load/compare.h"

#include <algorithm>

#include "client/load/report_text.h"

namespace attend::client {
namespace {

constexpr size_t kWindowsMin = 3;

using Figure = double (*)(double requests_per_s, const LatencyFigures& latency);
struct Compared {
  const char* name;
  Figure value;
};
constexpr Compared kCompared[] = {
    {"requests/s", [](double rate, const LatencyFigures&) { return rate; }},
    {"p50 ms", [](double, const LatencyFigures& latency) { return latency.p50_ms; }},
    {"p99 ms", [](double, const LatencyFigures& latency) { return latency.p99_ms; }}};

// Of the reported windows that have answers; lowest first.
std::vector<double> WindowValues(const FileStep& step, Figure value) {
  std::vector<double> values;
  for (const FileWindow& window : step.windows) {
    if (!window.reported || window.latency.count == 0) continue;
    values.push_back(value(window.requests_per_s, window.latency));
  }
  std::sort(values.begin(), values.end());
  return values;
}

std::optional<double> Noise(const std::vector<double>& values, double figure) {
  if (values.size() < kWindowsMin || !(figure > 0)) return std::nullopt;
  return 50 * (values.back() - values.front()) / figure;
}

Difference Differ(const FileStep& before, const FileStep& after, const Compared& compared) {
  Difference difference;
  difference.step = before.step;
  difference.figure = compared.name;
  difference.before = compared.value(before.requests_per_s, before.latency);
  difference.after = compared.value(after.requests_per_s, after.latency);
  const std::vector<double> earlier = WindowValues(before, compared.value);
  const std::vector<double> later = WindowValues(after, compared.value);
  difference.noise_before = Noise(earlier, difference.before);
  difference.noise_after = Noise(later, difference.after);
  if (!difference.noise_before || !difference.noise_after) return difference;
  difference.verdict = later.front() > earlier.back()   ? Verdict::kHigher
                       : later.back() < earlier.front() ? Verdict::kLower
                                                        : Verdict::kNoise;
  return difference;
}

const FileStep* Find(const LoadFile& file, const LoadStep& step) {
  for (const FileStep& each : file.steps) {
    if (each.step.concurrency == step.concurrency && each.step.rate_per_s == step.rate_per_s) {
      return &each;
    }
  }
  return nullptr;
}

std::string NoiseText(const std::optional<double>& percent) {
  if (!percent) return "?";
  std::string text;
  Append(&text, "%.1f %%", *percent);
  return text;
}

const char* VerdictText(Verdict verdict) {
  switch (verdict) {
    case Verdict::kHigher:
      return "higher";
    case Verdict::kLower:
      return "lower";
    case Verdict::kNoise:
      return "within noise";
    default:
      return "too few windows";
  }
}

}  // namespace

Comparison Compare(const LoadFile& before, const LoadFile& after) {
  Comparison comparison;
  for (const auto& [name, value] : before.setting) {
    if (name != "started" && after.Setting(name) != value) {
      comparison.settings.push_back(name + ": " + value + " | " + after.Setting(name));
    }
  }
  for (const FileStep& step : before.steps) {
    const FileStep* const other = Find(after, step.step);
    if (other == nullptr) {
      comparison.missing.push_back(StepName(step.step) + " is in " + before.name + " only");
      continue;
    }
    for (const Compared& compared : kCompared) {
      if (step.latency.count == 0 || other->latency.count == 0) continue;
      comparison.differences.push_back(Differ(step, *other, compared));
    }
  }
  for (const FileStep& step : after.steps) {
    if (Find(before, step.step) == nullptr) {
      comparison.missing.push_back(StepName(step.step) + " is in " + after.name + " only");
    }
  }
  return comparison;
}

std::string ComparisonTable(const LoadFile& before, const LoadFile& after,
                            const Comparison& comparison) {
  std::string out = "A: " + before.name + ", " + before.Setting("started") + "\nB: " + after.name +
                    ", " + after.Setting("started") + "\n";
  for (const std::string& setting : comparison.settings) out += "  not the same: " + setting + "\n";
  for (const std::string& missing : comparison.missing) out += "  " + missing + "\n";
  Append(&out, "%-16s %-10s %11s %11s %7s %9s %9s\n", "", "", "A", "B", "B / A", "noise A",
         "noise B");
  std::string last;
  for (const Difference& d : comparison.differences) {
    const std::string name = StepName(d.step);
    Append(&out, "%-16s %-10s %11.4g %11.4g %7.3f %9s %9s  %s\n", name == last ? "" : name.c_str(),
           d.figure.c_str(), d.before, d.after, d.ratio(), NoiseText(d.noise_before).c_str(),
           NoiseText(d.noise_after).c_str(), VerdictText(d.verdict));
    last = name;
  }
  return out;
}

}  // namespace attend::client
