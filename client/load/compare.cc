// SPDX-License-Identifier: Apache-2.0

#include "client/load/compare.h"

#include <algorithm>

#include "client/load/report_text.h"

namespace attend::client {
namespace {

constexpr size_t kRunsMin = 3;
constexpr size_t kWindowsMin = 3;
constexpr int64_t kAnswersMin = 100;  // per window, for its p99

using ValueOf = double (*)(double requests_per_s, const LatencyFigures& latency);
struct Compared {
  const char* name;
  ValueOf value;
  int64_t answers_min;  // per window, for a verdict
};
constexpr Compared kCompared[] = {
    {"requests/s", [](double rate, const LatencyFigures&) { return rate; }, 0},
    {"p50 ms", [](double, const LatencyFigures& latency) { return latency.p50_ms; }, 0},
    {"p99 ms", [](double, const LatencyFigures& latency) { return latency.p99_ms; }, kAnswersMin}};

const FileStep* Find(const LoadFile& file, const LoadStep& step) {
  for (const FileStep& each : file.steps) {
    if (each.step.concurrency == step.concurrency && each.step.rate_per_s == step.rate_per_s) {
      return &each;
    }
  }
  return nullptr;
}

// One side's measurements of a step, except those without answers.
std::vector<const FileStep*> StepsOf(const LoadRuns& runs, const LoadStep& step) {
  std::vector<const FileStep*> steps;
  for (const LoadFile& run : runs) {
    const FileStep* const found = Find(run, step);
    if (found != nullptr && found->latency.count > 0) steps.push_back(found);
  }
  return steps;
}

// Values of the reported windows that have answers, ascending.
std::vector<double> WindowValues(const FileStep& step, ValueOf value) {
  std::vector<double> values;
  for (const FileWindow& window : step.windows) {
    if (!window.reported || window.latency.count == 0) continue;
    values.push_back(value(window.requests_per_s, window.latency));
  }
  std::sort(values.begin(), values.end());
  return values;
}

SideFigure FigureOf(const std::vector<const FileStep*>& steps, ValueOf value) {
  std::vector<double> values;
  for (const FileStep* step : steps) values.push_back(value(step->requests_per_s, step->latency));
  std::sort(values.begin(), values.end());
  SideFigure side;
  side.runs = values.size();
  const size_t half = values.size() / 2;
  side.median = values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
  if (values.size() == 1) {
    values = WindowValues(*steps.front(), value);
    if (values.size() < kWindowsMin) return side;
  }
  side.range = {values.front(), values.back()};
  return side;
}

bool Every(const std::vector<const FileStep*>& steps, bool (*holds)(const FileStep&)) {
  return std::all_of(steps.begin(), steps.end(),
                     [&](const FileStep* step) { return holds(*step); });
}

bool IsStable(const FileStep& step) { return !step.judged || step.stable; }

bool HasAnswers(const FileStep& step) {
  return !step.windows.empty() &&
         std::all_of(step.windows.begin(), step.windows.end(), [](const FileWindow& window) {
           return !window.reported || window.latency.count >= kAnswersMin;
         });
}

Verdict Judge(const SideFigure& before, const SideFigure& after) {
  const bool single = before.runs == 1 && after.runs == 1;
  if (!single && std::min(before.runs, after.runs) < kRunsMin) return Verdict::kFewRuns;
  if (!before.range || !after.range) return Verdict::kFewWindows;
  const bool higher = after.range->lowest > before.range->highest;
  const bool lower = after.range->highest < before.range->lowest;
  if (single) return higher || lower ? Verdict::kBeyondWindows : Verdict::kWithinWindows;
  return higher ? Verdict::kHigher : lower ? Verdict::kLower : Verdict::kOverlap;
}

Difference Differ(const std::vector<const FileStep*>& before,
                  const std::vector<const FileStep*>& after, const Compared& compared) {
  Difference difference;
  difference.step = before.front()->step;
  difference.figure = compared.name;
  difference.before = FigureOf(before, compared.value);
  difference.after = FigureOf(after, compared.value);
  if (!Every(before, IsStable) || !Every(after, IsStable)) {
    difference.verdict = Verdict::kNotStable;
  } else if (compared.answers_min > 0 &&
             (!Every(before, HasAnswers) || !Every(after, HasAnswers))) {
    difference.verdict = Verdict::kFewAnswers;
  } else {
    difference.verdict = Judge(difference.before, difference.after);
  }
  return difference;
}

// Adds the value unless it is there; keeps the order.
void AddOnce(const std::string& value, std::vector<std::string>* values) {
  if (std::find(values->begin(), values->end(), value) == values->end()) values->push_back(value);
}

// The runs' different values of a setting: "auto, shm".
std::vector<std::string> ValuesOf(const LoadRuns& runs, const std::string& name) {
  std::vector<std::string> values;
  for (const LoadFile& run : runs) {
    const std::string& value = run.Setting(name);
    AddOnce(value.empty() ? "none" : value, &values);
  }
  return values;
}

std::string Joined(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) text += (text.empty() ? "" : ", ") + value;
  return text;
}

void CompareSettings(const LoadRuns& before, const LoadRuns& after, Comparison* comparison) {
  std::vector<std::string> names;
  for (const LoadRuns* runs : {&before, &after}) {
    for (const LoadFile& run : *runs) {
      for (const auto& [name, value] : run.setting) AddOnce(name, &names);
    }
  }
  for (const std::string& name : names) {
    const std::vector<std::string> first = ValuesOf(before, name), second = ValuesOf(after, name);
    if (name == "started" || (first.size() == 1 && first == second)) continue;
    comparison->settings.push_back(Printable(name + ": " + Joined(first) + " | " + Joined(second)));
  }
}

std::string RangeText(const std::optional<Range>& range) {
  if (!range) return "?";
  std::string text;
  Append(&text, "%.4g - %.4g", range->lowest, range->highest);
  return text;
}

const char* VerdictText(Verdict verdict) {
  switch (verdict) {
    case Verdict::kHigher:
      return "higher";
    case Verdict::kLower:
      return "lower";
    case Verdict::kOverlap:
      return "the runs' ranges overlap";
    case Verdict::kFewRuns:
      return "fewer than 3 runs a side";
    case Verdict::kBeyondWindows:
      return "beyond the windows' range; run-to-run noise unknown";
    case Verdict::kWithinWindows:
      return "within the windows' range";
    case Verdict::kFewWindows:
      return "fewer than 3 windows";
    case Verdict::kFewAnswers:
      return "fewer than 100 answers a window";
    default:
      return "NOT STABLE";
  }
}

std::string SideText(const char* side, const LoadRuns& runs) {
  std::string out;
  for (const LoadFile& run : runs) {
    out += (out.empty() ? std::string(side) + ": " : "   ") + run.name + ", " +
           run.Setting("started") + "\n";
  }
  return out;
}

}  // namespace

Comparison Compare(const LoadRuns& before, const LoadRuns& after) {
  Comparison comparison;
  CompareSettings(before, after, &comparison);
  std::vector<LoadStep> steps;
  for (const LoadRuns* runs : {&before, &after}) {
    for (const LoadFile& run : *runs) {
      for (const FileStep& step : run.steps) {
        const auto same = [&step](const LoadStep& known) {
          return known.concurrency == step.step.concurrency &&
                 known.rate_per_s == step.step.rate_per_s;
        };
        if (std::none_of(steps.begin(), steps.end(), same)) steps.push_back(step.step);
      }
    }
  }
  for (const LoadStep& step : steps) {
    for (const LoadRuns* runs : {&before, &after}) {
      for (const LoadFile& run : *runs) {
        if (Find(run, step) != nullptr) continue;
        comparison.missing.push_back(StepName(step) + " is not in " + run.name);
      }
    }
    const std::vector<const FileStep*> first = StepsOf(before, step), second = StepsOf(after, step);
    if (first.empty() || second.empty()) continue;
    for (const Compared& compared : kCompared) {
      comparison.differences.push_back(Differ(first, second, compared));
    }
  }
  return comparison;
}

std::string ComparisonTable(const LoadRuns& before, const LoadRuns& after,
                            const Comparison& comparison) {
  std::string out = SideText("A", before) + SideText("B", after);
  for (const std::string& setting : comparison.settings) out += "  not the same: " + setting + "\n";
  for (const std::string& missing : comparison.missing) out += "  " + missing + "\n";
  const bool single = before.size() == 1 && after.size() == 1;
  Append(&out, "Ranges are those of %s.\n",
         single ? "the windows"
                : "the runs, or of the windows where there is one run; A and B are medians");
  Append(&out, "%-16s %-10s %11s %11s %7s %21s %21s\n", "", "", "A", "B", "B / A", "range of A",
         "range of B");
  std::string last;
  for (const Difference& d : comparison.differences) {
    const std::string name = StepName(d.step);
    Append(&out, "%-16s %-10s %11.4g %11.4g %7.3f %21s %21s  %s\n",
           name == last ? "" : name.c_str(), d.figure.c_str(), d.before.median, d.after.median,
           d.ratio(), RangeText(d.before.range).c_str(), RangeText(d.after.range).c_str(),
           VerdictText(d.verdict));
    last = name;
  }
  return out;
}

}  // namespace attend::client
