// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

namespace attend::bench {
namespace {

// Formats a number with about three digits.
std::string Number(double value) {
  const double size = std::abs(value);
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", size >= 100 ? 0 : size >= 10 ? 1 : 2, value);
  return text;
}

std::string ResultText(const Figure& figure) {
  if (figure.question.measure == Measure::kDifference) {
    return (figure.result > 0 ? "+" : "") + Number(figure.result) + " " + figure.question.unit;
  }
  char text[64];
  std::snprintf(text, sizeof(text), "%.3fx", figure.result);  // so that 0.896 is not 0.90
  return text;
}

std::string TargetText(const Question& question) {
  if (!question.target.has_value()) return "";
  const bool least = question.target->sense == Target::Sense::kAtLeast;
  const bool ratio = question.measure == Measure::kRatio;
  return std::string(least ? ">= " : "<= ") + Number(question.target->value) +
         (ratio ? "x" : " " + question.unit);
}

// The text on one line, escaped for a table's cell.
std::string Cell(std::string text) {
  for (char& c : text) {
    if (c == '|' || c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

bool Reaches(const Target& target, double value) {
  return target.sense == Target::Sense::kAtLeast ? value >= target.value : value <= target.value;
}

}  // namespace

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMet:
      return "met";
    case Verdict::kMissed:
      return "missed";
    case Verdict::kNone:
      return "";
    case Verdict::kSkipped:
      return "skipped";
    case Verdict::kFailed:
      return "failed";
  }
  return "";
}

double Median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const size_t middle = values.size() / 2;
  std::sort(values.begin(), values.end());
  if (values.size() % 2 == 1) return values[middle];
  return (values[middle - 1] + values[middle]) / 2;
}

double Percentile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const double rank = std::ceil(share * static_cast<double>(values.size())) - 1;
  const size_t at = std::min(values.size() - 1, static_cast<size_t>(std::max(0.0, rank)));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

Figure Judge(Question question, std::vector<double> attend_rounds,
             std::vector<double> rival_rounds) {
  const bool ratio = question.measure == Measure::kRatio;
  if (attend_rounds.empty() || attend_rounds.size() != rival_rounds.size()) {
    return Failed(std::move(question), "the rounds do not pair up");
  }
  std::vector<double> results;
  for (size_t i = 0; i < attend_rounds.size(); ++i) {
    const double attend = attend_rounds[i];
    const double rival = rival_rounds[i];
    if (!std::isfinite(attend) || !std::isfinite(rival) || (ratio && !(rival > 0 && attend > 0))) {
      return Failed(std::move(question), "a round has no value");
    }
    results.push_back(ratio ? attend / rival : attend - rival);
  }
  Figure figure;
  figure.attend = Median(attend_rounds);
  figure.rival = Median(rival_rounds);
  figure.result = Median(results);
  if (question.target.has_value()) {
    figure.verdict = Reaches(*question.target, figure.result) ? Verdict::kMet : Verdict::kMissed;
  }
  figure.question = std::move(question);
  figure.attend_rounds = std::move(attend_rounds);
  figure.rival_rounds = std::move(rival_rounds);
  return figure;
}

Figure Skipped(Question question, std::string reason) {
  Figure figure;
  figure.question = std::move(question);
  figure.verdict = Verdict::kSkipped;
  figure.reason = std::move(reason);
  return figure;
}

Figure Failed(Question question, std::string reason) {
  Figure figure = Skipped(std::move(question), std::move(reason));
  figure.verdict = Verdict::kFailed;
  return figure;
}

std::string MarkdownTable(std::span<const Figure> figures) {
  std::string text =
      "| Row | Work | Against | attend | rival | result | must reach | |\n"
      "|---|---|---|---|---|---|---|---|\n";
  for (const Figure& figure : figures) {
    const Question& q = figure.question;
    text += "| " + Cell(q.row) + " | " + Cell(q.work) + " | " + Cell(q.against) + " | ";
    if (figure.measured()) {
      text += Number(figure.attend) + " " + q.unit + " | " + Number(figure.rival) + " " + q.unit +
              " | " + ResultText(figure);
    } else {
      text += "| | ";
    }
    text += " | " + TargetText(q) + " | " + VerdictName(figure.verdict);
    if (!figure.reason.empty()) text += ": " + Cell(figure.reason);
    text += " |\n";
  }
  return text;
}

nlohmann::json ToJson(std::span<const Figure> figures) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Figure& figure : figures) {
    const Question& q = figure.question;
    nlohmann::json row = {{"row", q.row},
                          {"work", q.work},
                          {"against", q.against},
                          {"unit", q.unit},
                          {"measure", q.measure == Measure::kRatio ? "ratio" : "difference"},
                          {"verdict", VerdictName(figure.verdict)}};
    if (q.target.has_value()) {
      const bool least = q.target->sense == Target::Sense::kAtLeast;
      row["target"] = {{least ? "at_least" : "at_most", q.target->value}};
    }
    if (!figure.reason.empty()) row["reason"] = figure.reason;
    if (figure.measured()) {
      row["attend"] = figure.attend;
      row["rival"] = figure.rival;
      row["result"] = figure.result;
      row["attend_rounds"] = figure.attend_rounds;
      row["rival_rounds"] = figure.rival_rounds;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace attend::bench
