// SPDX-License-Identifier: Apache-2.0
//
// A drawing as a list of lines, areas and text, in pixels from the upper left corner; written as
// SVG, with text as text. Plain values.

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
  std::vector<double> dashes = {};  // lengths drawn and skipped in turn; empty: solid
};

enum class Anchor { kStart, kMiddle, kEnd };
struct TextStyle {
  double size = 12;
  Anchor anchor = Anchor::kStart;
  Color color = kInk;
  bool upward = false;  // rotated, reads from bottom to top
};

struct Line {
  std::vector<Point> points;
  Pen pen;
};
struct Area {
  std::vector<Point> points;  // the last is connected to the first
  Color color = kInk;
  double opacity = 1;
};
struct Disc {
  Point center;
  double radius = 1;
  Color color = kInk;
};
struct Words {
  Point at;  // on the baseline
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

// Approximate width of a line of UTF-8 text in pixels; the viewer chooses the font.
double TextWidth(const std::string& text, double size);

std::string SvgOf(const Drawing& drawing);

// INVALID_ARGUMENT unless the name ends in .svg.
Status CheckPictureName(const std::string& path);
Status WritePicture(const Drawing& drawing, const std::string& path);

}  // namespace attend::client
