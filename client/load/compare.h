// SPDX-License-Identifier: Apache-2.0
//
// Results of runs before and after a change beside each other: ratios, and which of them say
// something. Pure.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "client/load/load_file.h"

namespace attend::client {

// Runs of one program differ by more than their windows do: a run has its own memory, threads and
// neighbours. So only several runs on either side can show a difference.
enum class Verdict {
  kHigher,         // every run after is above every run before
  kLower,          // or below
  kOverlap,        // the runs' ranges have values in common
  kFewRuns,        // fewer than three on a side
  kBeyondWindows,  // of one run each: no window of the one is within the range of the other's
  kWithinWindows,
  kFewWindows,  // of one run each: fewer than three
  kFewAnswers,  // for a p99: a window has fewer than 100
  kNotStable,   // a run did not become as stable as it was asked to
};

struct Range {
  double lowest = 0, highest = 0;
};

// A figure of one side.
struct SideFigure {
  double median = 0;           // of the runs
  size_t runs = 0;             // that have the figure
  std::optional<Range> range;  // of the runs; of one run: its windows, if there are three
};

struct Difference {
  LoadStep step;
  std::string figure;  // "requests/s", "p50 ms", "p99 ms"
  SideFigure before, after;
  Verdict verdict = Verdict::kFewRuns;

  double ratio() const { return after.median / before.median; }
};

// Runs of the same thing.
using LoadRuns = std::vector<LoadFile>;

struct Comparison {
  std::vector<std::string> settings;  // "transport: inline | shm": what is not the same
  std::vector<std::string> missing;   // steps that not every file has
  std::vector<Difference> differences;
};

// At least one run on either side.
Comparison Compare(const LoadRuns& before, const LoadRuns& after);
std::string ComparisonTable(const LoadRuns& before, const LoadRuns& after,
                            const Comparison& comparison);

}  // namespace attend::client
