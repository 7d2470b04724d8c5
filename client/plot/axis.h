// SPDX-License-Identifier: Apache-2.0
//
// A chart's axis: the mapping from numbers to pixels, and the ticks. Pure.

#pragma once

#include <string>
#include <vector>

namespace attend::client {

class Axis {
 public:
  // Covers `values`, except those that cannot be shown: not finite, negative, or not positive on a
  // logarithmic axis. Linear axes begin at 0.
  Axis(const std::vector<double>& values, bool logarithmic);

  void Place(double first_px, double last_px) { first_px_ = first_px, last_px_ = last_px; }
  double At(double value) const;  // in pixels
  bool Shows(double value) const;
  // Round numbers on the axis: at least two, about `wanted`, at most twice as many.
  std::vector<double> Ticks(int wanted) const;
  double low() const { return low_; }
  double high() const { return high_; }

 private:
  std::vector<double> LogTicks(int wanted) const;

  bool logarithmic_;
  double low_ = 0;
  double high_ = 1;
  double first_px_ = 0;
  double last_px_ = 1;
};

// 1500 as "1.5k", 0.25 as "0.25", 2000000 as "2M".
std::string TickText(double value);

}  // namespace attend::client
