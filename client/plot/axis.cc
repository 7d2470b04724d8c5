// SPDX-License-Identifier: Apache-2.0

#include "client/plot/axis.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace attend::client {

Axis::Axis(const std::vector<double>& values, bool logarithmic) : logarithmic_(logarithmic) {
  std::vector<double> shown;
  for (const double value : values) {
    if (Shows(value)) shown.push_back(value);
  }
  if (shown.empty()) {
    low_ = logarithmic ? 0.1 : 0;
    return;
  }
  const auto [least, most] = std::minmax_element(shown.begin(), shown.end());
  low_ = 0;
  high_ = *most > 0 ? *most * 1.06 : 1;
  if (!logarithmic) return;
  // Margin around the points, and at least a factor of 4 in total, so that there are ticks.
  const double room =
      std::max(0.06 * std::log(*most / *least), 0.5 * std::log(4 / std::min(4.0, *most / *least)));
  low_ = *least / std::exp(std::max(room, 0.03));
  high_ = *most * std::exp(std::max(room, 0.03));
}

bool Axis::Shows(double value) const {
  return std::isfinite(value) && (logarithmic_ ? value > 0 : value >= 0);
}

double Axis::At(double value) const {
  double share = (value - low_) / (high_ - low_);
  if (logarithmic_) share = std::log(value / low_) / std::log(high_ / low_);
  return first_px_ + share * (last_px_ - first_px_);
}

std::vector<double> Axis::Ticks(int wanted) const {
  if (logarithmic_) return LogTicks(wanted);
  const double power = std::pow(10, std::floor(std::log10(high_ / wanted)));
  double step = 10 * power;
  for (const double digit : {1.0, 2.0, 5.0}) {
    if (high_ / (digit * power) <= wanted + 0.5) {
      step = digit * power;
      break;
    }
  }
  std::vector<double> ticks;
  for (int n = 0; n * step <= high_; ++n) ticks.push_back(n * step);
  return ticks;
}

std::vector<double> Axis::LogTicks(int wanted) const {
  const int first = static_cast<int>(std::floor(std::log10(low_)));
  const int last = static_cast<int>(std::ceil(std::log10(high_)));
  std::vector<double> ticks;
  // The coarsest set with enough ticks.
  for (const std::vector<double>& digits :
       {std::vector<double>{1}, {1, 3}, {1, 2, 5}, {1, 1.5, 2, 3, 4, 5, 6, 8}}) {
    ticks.clear();
    for (int power = first; power <= last; ++power) {
      for (const double digit : digits) {
        const double tick = digit * std::pow(10, power);
        if (tick >= low_ && tick <= high_) ticks.push_back(tick);
      }
    }
    if (static_cast<int>(ticks.size()) >= std::max(2, wanted - 1)) break;
  }
  if (static_cast<int>(ticks.size()) <= 2 * wanted) return ticks;
  // Many powers of ten: keep every n-th.
  const auto every = static_cast<size_t>(std::ceil(static_cast<double>(ticks.size()) / wanted));
  std::vector<double> fewer;
  for (size_t i = 0; i < ticks.size(); i += every) fewer.push_back(ticks[i]);
  return fewer;
}

std::string TickText(double value) {
  const char* suffix = "";
  for (const auto& [unit, name] : {std::pair{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (value < unit) continue;
    value /= unit;
    suffix = name;
    break;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.3g%s", value, suffix);
  return text;
}

}  // namespace attend::client
