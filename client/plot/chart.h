// SPDX-License-Identifier: Apache-2.0
//
// Charts as values, and how they are drawn: lines over numbers, and stacked bars, in panels of one
// figure.

#pragma once

#include <string>
#include <variant>
#include <vector>

#include "client/plot/drawing.h"

namespace attend::client {

struct Series {
  std::string name;
  std::vector<Point> points;
  std::vector<std::string> labels;  // beside the points; empty: none
  bool bare = false;                // without marks at the points
};

struct LineChart {
  std::string title;
  std::string x_label, y_label;  // with units
  bool log_x = false, log_y = false;
  std::vector<Series> series;
  std::vector<double> x_ticks = {};  // empty: round numbers
};

// Rows of a bar each, which consists of parts one after another.
struct BarChart {
  struct Row {
    std::string name;
    std::vector<double> parts;
    // Single measurements of their sum: a line from the least to the greatest. Empty: none.
    std::vector<double> range = {};
  };
  std::string title;
  std::string x_label;             // with the unit
  std::string unit;                // written after each bar's sum
  std::vector<std::string> parts;  // their names
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

// Panels with the same names have one legend at the top, others one each.
Drawing Draw(const Figure& figure);

}  // namespace attend::client
