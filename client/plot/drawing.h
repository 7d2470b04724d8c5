// SPDX-License-Identifier: Apache-2.0
//
// A picture as a list of lines, areas and words, in pixels from the upper left corner; written as
// SVG, whose words stay words. Plain values.

#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "kernels/util/status.h"

namespace attend::client {

struct Point {
  double x = 0;
  double y = 0;
};

using Color = uint32_t;  // 0xRRGGBB
inline constexpr Color kInk = 0x222222;

struct Pen {
  Color color = kInk;
  double width = 1;
  std::vector<double> dashes = {};  // lengths drawn and left out in turn; empty: drawn through
};

enum class Anchor { kStart, kMiddle, kEnd };
struct TextStyle {
  double size = 12;
  Anchor anchor = Anchor::kStart;
  Color color = kInk;
  bool upward = false;  // reads from bottom to top
};

struct Line {
  std::vector<Point> points;
  Pen pen;
};
struct Area {
  std::vector<Point> points;  // the last is joined to the first
  Color color = kInk;
  double opacity = 1;
};
struct Disc {
  Point center;
  double radius = 1;
  Color color = kInk;
};
struct Words {
  Point at;  // on the base line
  std::string text;
  TextStyle style;
};

struct Drawing {
  double width = 0;
  double height = 0;
  std::vector<std::variant<Line, Area, Disc, Words>> items;  // later ones cover earlier ones

  void Add(Line line);
  void Add(Area area);
  void Add(Disc disc);
  void Add(Words words);
  void AddBox(double left, double top, double right, double bottom, Color color);
};

// About the width of a line of text (UTF-8), in pixels: the viewer chooses the font.
double TextWidth(const std::string& text, double size);

std::string SvgOf(const Drawing& drawing);

// OK if the name ends in .svg.
Status CheckPictureName(const std::string& path);
Status WritePicture(const Drawing& drawing, const std::string& path);

}  // namespace attend::client
