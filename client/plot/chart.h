// SPDX-License-Identifier: Apache-2.0
//
// Charts as values, and how to draw them: line charts and stacked bars, in panels of one figure.

#pragma once

#include <string>
#include <variant>
#include <vector>

#include "client/plot/drawing.h"

namespace attend::client {

struct Series {
  std::string name;
  std::vector<Point> points;
  std::vector<std::string> labels = {};  // at the points; empty: none
  bool bare = false;                     // without marks at the points
  // Individual measurements of each point's y, drawn as a line from the least to the greatest.
  // Empty: none.
  std::vector<std::vector<double>> ranges = {};
};

struct LineChart {
  std::string title;
  std::string x_label, y_label;  // with units
  bool log_x = false, log_y = false;
  std::vector<Series> series;
  std::vector<double> x_ticks = {};  // empty: round numbers
};

// One bar per row, stacked from parts.
struct BarChart {
  struct Row {
    std::string name;
    std::vector<double> parts;
    // Individual measurements of the sum, drawn as a line from the least to the greatest. Empty:
    // none.
    std::vector<double> range = {};
  };
  std::string title;
  std::string x_label;             // with the unit
  std::string unit;                // written after each bar's sum
  std::vector<std::string> parts;  // the parts' names
  std::vector<Row> rows;
};

struct Figure {
  std::string title;
  std::vector<std::string> subtitle;  // lines
  std::vector<std::variant<LineChart, BarChart>> panels;
  int columns = 2;
  double panel_width = 430;
  double panel_height = 310;
};

// Panels with the same series names share one legend at the top; otherwise each has its own. Parts
// of bars that are too thin to be seen are not in it.
Drawing Draw(const Figure& figure);

}  // namespace attend::client
