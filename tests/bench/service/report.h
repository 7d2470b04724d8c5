// SPDX-License-Identifier: Apache-2.0
//
// Figures against targets: medians of rounds, what one side is to the other, a verdict, and tables
// of them. Pure.

#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace attend::bench {

// What is asked: this work on attend against that rival.
enum class Measure {
  kRatio,       // attend's value over the rival's
  kDifference,  // attend's value minus the rival's
};
struct Target {
  enum class Sense { kAtLeast, kAtMost };
  Sense sense = Sense::kAtLeast;
  double value = 0;
};
struct Question {
  std::string row;
  std::string work;
  std::string against;
  std::string unit;  // of both sides' values
  Measure measure = Measure::kRatio;
  std::optional<Target> target;  // none: the figure only informs
};

enum class Verdict {
  kMet,
  kMissed,
  kNone,     // no target
  kSkipped,  // not measured on this machine, `reason` says why
  kFailed,   // wrong or no answers: there is no value
};
const char* VerdictName(Verdict verdict);

struct Figure {
  Question question;
  Verdict verdict = Verdict::kNone;
  std::string reason;  // of kSkipped and kFailed
  // Medians of the rounds; `result` is the median of the rounds' ratios or differences.
  double attend = 0;
  double rival = 0;
  double result = 0;
  std::vector<double> attend_rounds;
  std::vector<double> rival_rounds;

  bool measured() const { return verdict != Verdict::kSkipped && verdict != Verdict::kFailed; }
};

// Of an even count the mean of the two in the middle; NaN of none.
double Median(std::vector<double> values);
// The value that `share` of the values do not exceed; reorders them. 0 of none.
double Percentile(std::vector<double>& values, double share);

// kFailed if the rounds do not pair up, or hold a value that no ratio can be made of.
Figure Judge(Question question, std::vector<double> attend_rounds,
             std::vector<double> rival_rounds);
Figure Skipped(Question question, std::string reason);
Figure Failed(Question question, std::string reason);

// One line a figure; those without a value give their reason instead.
std::string MarkdownTable(std::span<const Figure> figures);
nlohmann::json ToJson(std::span<const Figure> figures);

}  // namespace attend::bench
