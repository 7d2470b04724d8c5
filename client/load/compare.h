// SPDX-License-Identifier: Apache-2.0
//
// Two files of results beside each other: ratios, and which of them say something. Pure.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "client/load/load_file.h"

namespace attend::client {

// Whether two figures differ by more than their noise: no window of the one file is within the
// range of the other's windows. Unknown if a file has fewer than three windows of the step.
enum class Verdict { kUnknown, kNoise, kHigher, kLower };

struct Difference {
  LoadStep step;
  std::string figure;  // "requests/s", "p50 ms", "p99 ms"
  double before = 0, after = 0;
  // Half the range of the windows, in percent of the figure; none: too few windows.
  std::optional<double> noise_before, noise_after;
  Verdict verdict = Verdict::kUnknown;

  double ratio() const { return after / before; }
};

struct Comparison {
  std::vector<std::string> settings;  // "transport: inline, shm": what is not the same
  std::vector<std::string> missing;   // steps that one file alone has
  std::vector<Difference> differences;
};

Comparison Compare(const LoadFile& before, const LoadFile& after);
std::string ComparisonTable(const LoadFile& before, const LoadFile& after,
                            const Comparison& comparison);

}  // namespace attend::client
