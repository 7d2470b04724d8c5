// SPDX-License-Identifier: Apache-2.0
//
// Figures and their targets: medians of rounds, the ratio or difference of both sides, a verdict,
// and tables of them. Pure functions.

#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace attend::bench {

// How a figure compares attend with its rival.
enum class Measure {
  kRatio,       // attend's value over the rival's
  kDifference,  // attend's value minus the rival's
};
struct Target {
  enum class Sense { kAtLeast, kAtMost };
  Sense sense = Sense::kAtLeast;
  double value = 0;
};
// A work, and the rival that attend is compared with.
struct Question {
  std::string row;
  std::string work;
  std::string against;
  std::string unit;  // of both sides' values
  Measure measure = Measure::kRatio;
  std::optional<Target> target;  // none: for information only
};

enum class Verdict {
  kMet,
  kMissed,
  kNone,     // no target
  kSkipped,  // not measured on this machine, see `reason`
  kFailed,   // wrong or missing answers, so that there is no value
};
const char* VerdictName(Verdict verdict);

struct Figure {
  Question question;
  Verdict verdict = Verdict::kNone;
  std::string reason;  // for kSkipped and kFailed
  // Medians of the rounds; `result` is the median of the rounds' ratios or differences.
  double attend = 0;
  double rival = 0;
  double result = 0;
  std::vector<double> attend_rounds;
  std::vector<double> rival_rounds;

  bool measured() const { return verdict != Verdict::kSkipped && verdict != Verdict::kFailed; }
};

// With an even count, the mean of the two middle values; NaN without values.
double Median(std::vector<double> values);
// The value that `share` of the values do not exceed, 0 without values. Reorders them.
double Percentile(std::vector<double>& values, double share);

// kFailed if the numbers of rounds differ, or a value cannot be part of a ratio.
Figure Judge(Question question, std::vector<double> attend_rounds,
             std::vector<double> rival_rounds);
Figure Skipped(Question question, std::string reason);
Figure Failed(Question question, std::string reason);

// A line per figure, with the reason instead of a missing value.
std::string MarkdownTable(std::span<const Figure> figures);
nlohmann::json ToJson(std::span<const Figure> figures);

}  // namespace attend::bench
