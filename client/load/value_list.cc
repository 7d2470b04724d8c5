// SPDX-License-Identifier: Apache-2.0

#include "client/load/value_list.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace attend::client {
namespace {

constexpr size_t kValuesMax = 1000;
// A last value that rounding puts just beyond the range's end still belongs to it.
constexpr double kRounding = 1e-9;

std::vector<std::string> Split(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string Short(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

Result<double> Number(const std::string& what, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value)) {
    return InvalidArgument(what + ": \"" + text + "\" is not a number");
  }
  return value;
}

struct Range {
  double first, last;
  double step = 1;
  bool times = false;
};

Result<Range> ParseRange(const std::string& what, const std::string& text) {
  const std::vector<std::string> parts = Split(text, ':');
  if (parts.size() > 3) {
    return InvalidArgument(what + ": must be FIRST:LAST, FIRST:LAST:+STEP or FIRST:LAST:xFACTOR");
  }
  Range range;
  const Result<double> first = Number(what, parts[0]);
  if (!first.ok()) return first.status();
  range.first = range.last = *first;
  if (parts.size() == 1) return range;
  const Result<double> last = Number(what, parts[1]);
  if (!last.ok()) return last.status();
  range.last = *last;
  if (range.last < range.first) {
    return InvalidArgument(what + ": the range ends before it begins");
  }
  if (parts.size() == 2) return range;
  range.times = parts[2].starts_with('x');
  const bool sign = range.times || parts[2].starts_with('+');
  const Result<double> step = Number(what, parts[2].substr(sign ? 1 : 0));
  if (!step.ok()) return step.status();
  range.step = *step;
  if (range.step > (range.times ? 1 : 0)) return range;
  return InvalidArgument(what + (range.times ? ": the factor is " : ": the step is ") +
                         Short(range.step) + ", must be above " + (range.times ? "1" : "0"));
}

}  // namespace

Result<std::vector<double>> ParseValues(const std::string& flag, const std::string& text,
                                        const ValueBounds& bounds) {
  std::vector<double> values;
  for (const std::string& item : Split(text, ',')) {
    const std::string what = flag + " " + item;
    const Result<Range> range = ParseRange(what, item);
    if (!range.ok()) return range.status();
    const double end = range->last + kRounding * std::abs(range->last);
    double value = range->first;
    for (int n = 1; value <= end; ++n) {
      if (!(value >= bounds.low && value <= bounds.high)) {
        return InvalidArgument(what + ": " + Short(value) + " is not in [" + Short(bounds.low) +
                               ", " + Short(bounds.high) + "]");
      }
      if (bounds.whole && value != std::floor(value)) {
        return InvalidArgument(what + ": " + Short(value) + " is not a whole number");
      }
      if (values.size() == kValuesMax) {
        return InvalidArgument(what + ": more than " + std::to_string(kValuesMax) + " values");
      }
      values.push_back(value);
      value = range->times ? value * range->step : range->first + n * range->step;
    }
  }
  return values;
}

}  // namespace attend::client
