// SPDX-License-Identifier: Apache-2.0
//
// Compares the results of runs before and after a change: ratios, and which of them are
// significant. Pure.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "client/load/load_file.h"

namespace attend::client {

// Runs of one program differ by more than their windows do: each run has its own memory layout,
// threads and neighbours. So only several runs per side can show a difference.
enum class Verdict {
  kHigher,         // every run after is above every run before
  kLower,          // every run after is below every run before
  kOverlap,        // the runs' ranges overlap
  kFewRuns,        // fewer than three per side
  kBeyondWindows,  // one run each: their windows' ranges do not overlap
  kWithinWindows,
  kFewWindows,  // one run each: fewer than three windows
  kFewAnswers,  // for a p99: a window has fewer than 100 answers
  kNotStable,   // a run did not meet its stability rule
};

struct Range {
  double lowest = 0, highest = 0;
};

// One side's figure.
struct SideFigure {
  double median = 0;           // of the runs
  size_t runs = 0;             // runs that have the figure
  std::optional<Range> range;  // of the runs; of one run: its windows, if at least three
};

struct Difference {
  LoadStep step;
  std::string figure;  // "requests/s", "p50 ms", "p99 ms"
  SideFigure before, after;
  Verdict verdict = Verdict::kFewRuns;

  double ratio() const { return after.median / before.median; }
};

// Repeated runs of one side.
using LoadRuns = std::vector<LoadFile>;

struct Comparison {
  std::vector<std::string> settings;  // "transport: inline | shm": settings that differ
  std::vector<std::string> missing;   // steps that some file lacks
  std::vector<Difference> differences;
};

// Each side must have at least one run.
Comparison Compare(const LoadRuns& before, const LoadRuns& after);
std::string ComparisonTable(const LoadRuns& before, const LoadRuns& after,
                            const Comparison& comparison);

}  // namespace attend::client
