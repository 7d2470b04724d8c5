// SPDX-License-Identifier: Apache-2.0

#include "client/plot/chart.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <span>
#include <variant>

#include "client/plot/axis.h"

namespace attend::client {
namespace {

constexpr Color kColors[] = {0x1b6ca8, 0xd1495b, 0x3a7d44, 0xc98a1b,
                             0x8f5fa8, 0x2aa198, 0x4a4a4a, 0xa05a2c};
constexpr Color kGrid = 0xdddddd;
constexpr Color kGray = 0x666666;
constexpr double kLegendLine = 18;

Color ColorOf(size_t n) { return kColors[n % std::size(kColors)]; }

// Lines of one color differ by their dashes.
Pen PenOf(size_t n) {
  static const std::vector<double> kDashes[] = {{}, {7, 4}, {2, 3}};
  return {ColorOf(n), 2, kDashes[n / std::size(kColors) % 3]};
}

struct Box {
  double left, top, right, bottom;
};

// A part of a bar that is less than this share of the longest bar is not seen.
constexpr double kSeenShare = 0.001;

// Draws one panel.
class Painter {
 public:
  explicit Painter(Drawing* drawing) : drawing_(*drawing) {}

  void Text(Point at, const std::string& text, TextStyle style = {}) {
    drawing_.Add(Words{at, text, style});
  }
  void Path(std::vector<Point> points, Pen pen) {
    drawing_.Add(Line{std::move(points), std::move(pen)});
  }
  // Leaves out empty names. Wraps lines to the box's width, from its top. Returns the height used.
  double Legend(const Box& box, const std::vector<std::string>& names, bool lines);
  void Panel(const LineChart& chart, Box box, bool legend);
  void Panel(const BarChart& chart, Box box, bool legend);

 private:
  void Title(const std::string& title, Box* box) {
    Text({(box->left + box->right) / 2, box->top + 15}, title, {14, Anchor::kMiddle});
    box->top += 26;
  }
  void Frame(const LineChart& chart, const Box& box, const Axis& x, const Axis& y);
  void Lines(const LineChart& chart, const Axis& x, const Axis& y);
  // The range of the measurements at one x.
  void Ranges(double at, const std::vector<double>& measured, const Axis& x, const Axis& y,
              Color color);
  void Labels(const Series& series, const Axis& x, const Axis& y);
  // A line between two points with a stroke across each end.
  void Range(Point from, Point to, Pen pen);
  void Bars(const BarChart& chart, const Box& box, const Axis& x);
  void XTicks(const Box& box, const Axis& axis, std::vector<double> ticks, const std::string& label,
              bool grid);

  Drawing& drawing_;
};

std::vector<std::string> NamesOf(const LineChart& chart) {
  std::vector<std::string> names;
  for (const Series& series : chart.series) names.push_back(series.name);
  return names;
}
std::vector<std::string> NamesOf(const BarChart& chart) { return chart.parts; }

double SumOf(const BarChart::Row& row) {
  return std::accumulate(row.parts.begin(), row.parts.end(), 0.0);
}

using AnyChart = std::variant<LineChart, BarChart>;

std::vector<std::string> NamesOf(const AnyChart& panel) {
  return std::visit([](const auto& chart) { return NamesOf(chart); }, panel);
}

void MarkSeen(const LineChart&, std::vector<bool>* seen) { seen->assign(seen->size(), true); }
void MarkSeen(const BarChart& chart, std::vector<bool>* seen) {
  double longest = 0;
  for (const BarChart::Row& row : chart.rows) longest = std::max(longest, SumOf(row));
  for (const BarChart::Row& row : chart.rows) {
    for (size_t part = 0; part < std::min(seen->size(), row.parts.size()); ++part) {
      if (row.parts[part] > kSeenShare * longest) (*seen)[part] = true;
    }
  }
}

// The panels' common names; empty where no panel shows anything of that name.
std::vector<std::string> LegendOf(std::span<const AnyChart> panels) {
  std::vector<std::string> names = NamesOf(panels.front());
  std::vector<bool> seen(names.size());
  for (const AnyChart& panel : panels) {
    std::visit([&seen](const auto& chart) { MarkSeen(chart, &seen); }, panel);
  }
  for (size_t n = 0; n < names.size(); ++n) {
    if (!seen[n]) names[n].clear();
  }
  return names;
}

double Painter::Legend(const Box& box, const std::vector<std::string>& names, bool lines) {
  double x = box.left, y = box.top;
  for (size_t n = 0; n < names.size(); ++n) {
    if (names[n].empty()) continue;
    const double width = 26 + TextWidth(names[n], 11) + 14;
    if (x > box.left && x + width > box.right + 14) {
      x = box.left;
      y += kLegendLine;
    }
    if (lines) {
      Path({{x, y + 6}, {x + 20, y + 6}}, PenOf(n));
    } else {
      drawing_.AddBox(x + 6, y, x + 18, y + 12, ColorOf(n));
    }
    Text({x + 26, y + 10}, names[n], {11});
    x += width;
  }
  return y - box.top + kLegendLine + 6;
}

void Painter::XTicks(const Box& box, const Axis& axis, std::vector<double> ticks,
                     const std::string& label, bool grid) {
  const int wanted = std::max(3, static_cast<int>((box.right - box.left) / 60));
  double free_from = -1e9;  // end of the last label
  if (ticks.empty()) ticks = axis.Ticks(wanted);
  for (const double tick : ticks) {
    const double x = axis.At(tick);
    if (grid) Path({{x, box.top}, {x, box.bottom}}, {kGrid});
    const std::string words = TickText(tick);
    const double half = TextWidth(words, 11) / 2;
    if (x - half < free_from) continue;
    free_from = x + half + 6;
    Path({{x, box.bottom}, {x, box.bottom + 4}}, {});
    Text({x, box.bottom + 17}, words, {11, Anchor::kMiddle});
  }
  Text({(box.left + box.right) / 2, box.bottom + 35}, label, {12, Anchor::kMiddle});
}

void Painter::Frame(const LineChart& chart, const Box& box, const Axis& x, const Axis& y) {
  for (const double tick : y.Ticks(5)) {
    const double at = y.At(tick);
    Path({{box.left, at}, {box.right, at}}, {kGrid});
    Text({box.left - 6, at + 4}, TickText(tick), {11, Anchor::kEnd});
  }
  XTicks(box, x, chart.x_ticks, chart.x_label, false);
  Path({{box.left, box.top}, {box.left, box.bottom}, {box.right, box.bottom}}, {});
  Text({box.left - 46, (box.top + box.bottom) / 2}, chart.y_label,
       {12, Anchor::kMiddle, kInk, /*upward=*/true});
}

void Painter::Lines(const LineChart& chart, const Axis& x, const Axis& y) {
  for (size_t n = 0; n < chart.series.size(); ++n) {
    const Series& series = chart.series[n];
    std::vector<Point> points;
    for (const Point& point : series.points) {
      if (x.Shows(point.x) && y.Shows(point.y)) points.push_back({x.At(point.x), y.At(point.y)});
    }
    for (size_t i = 0; i < std::min(series.ranges.size(), series.points.size()); ++i) {
      Ranges(series.points[i].x, series.ranges[i], x, y, ColorOf(n));
    }
    if (points.size() > 1) Path(points, PenOf(n));
    if (series.bare) continue;
    for (const Point& point : points) drawing_.Add(Disc{point, 3.2, ColorOf(n)});
  }
  for (const Series& series : chart.series) Labels(series, x, y);
}

void Painter::Ranges(double at, const std::vector<double>& measured, const Axis& x, const Axis& y,
                     Color color) {
  std::vector<double> shown;
  std::copy_if(measured.begin(), measured.end(), std::back_inserter(shown),
               [&y](double value) { return y.Shows(value); });
  if (shown.empty() || !x.Shows(at)) return;
  const auto [low, high] = std::minmax_element(shown.begin(), shown.end());
  Range({x.At(at), y.At(*low)}, {x.At(at), y.At(*high)}, {color});
}

// Draws the labels that do not overlap earlier ones.
void Painter::Labels(const Series& series, const Axis& x, const Axis& y) {
  std::vector<Box> taken;
  for (size_t i = 0; i < std::min(series.labels.size(), series.points.size()); ++i) {
    const Point& point = series.points[i];
    if (!x.Shows(point.x) || !y.Shows(point.y)) continue;
    const Point at = {x.At(point.x), y.At(point.y) - 8};
    const double half = TextWidth(series.labels[i], 10) / 2;
    const Box words = {at.x - half - 2, at.y - 10, at.x + half + 2, at.y + 2};
    const bool covered = std::any_of(taken.begin(), taken.end(), [&](const Box& other) {
      return words.left < other.right && other.left < words.right && words.top < other.bottom &&
             other.top < words.bottom;
    });
    if (covered) continue;
    taken.push_back(words);
    Text(at, series.labels[i], {10, Anchor::kMiddle, kGray});
  }
}

void Painter::Panel(const LineChart& chart, Box box, bool legend) {
  std::vector<double> xs, ys;
  for (const Series& series : chart.series) {
    for (const Point& point : series.points) {
      xs.push_back(point.x);
      ys.push_back(point.y);
    }
    for (const auto& range : series.ranges) ys.insert(ys.end(), range.begin(), range.end());
  }
  Title(chart.title, &box);
  box.left += 62;
  box.right -= 14;
  if (legend) box.top += Legend(box, LegendOf(std::vector<AnyChart>{chart}), true);
  box.bottom -= 48;
  Axis x(xs, chart.log_x), y(ys, chart.log_y);
  x.Place(box.left, box.right);
  y.Place(box.bottom, box.top + 6);
  Frame(chart, box, x, y);
  Lines(chart, x, y);
}

void Painter::Range(Point from, Point to, Pen pen) {
  Path({from, to}, pen);
  const Point across = from.y == to.y ? Point{0, 4} : Point{4, 0};
  for (const Point& end : {from, to}) {
    Path({{end.x - across.x, end.y - across.y}, {end.x + across.x, end.y + across.y}}, pen);
  }
}

void Painter::Bars(const BarChart& chart, const Box& box, const Axis& x) {
  const double height = (box.bottom - box.top) / static_cast<double>(chart.rows.size());
  const double thick = std::min(26.0, height * 0.7);
  for (size_t row = 0; row < chart.rows.size(); ++row) {
    const double middle = box.top + height * (static_cast<double>(row) + 0.5);
    Text({box.left - 6, middle + 4}, chart.rows[row].name, {11, Anchor::kEnd});
    double sum = 0;
    for (size_t part = 0; part < chart.rows[row].parts.size(); ++part) {
      const double value = chart.rows[row].parts[part];
      if (!(value > 0)) continue;
      drawing_.AddBox(x.At(sum), middle - thick / 2, x.At(sum + value), middle + thick / 2,
                      ColorOf(part));
      sum += value;
    }
    double end = sum;
    if (const std::vector<double>& range = chart.rows[row].range; !range.empty()) {
      const auto [low, high] = std::minmax_element(range.begin(), range.end());
      Range({x.At(*low), middle}, {x.At(*high), middle}, {});
      end = std::max(end, *high);
    }
    if (height >= 11) Text({x.At(end) + 5, middle + 4}, TickText(sum) + " " + chart.unit, {10});
  }
  Path({{box.left, box.top}, {box.left, box.bottom}, {box.right, box.bottom}}, {});
}

void Painter::Panel(const BarChart& chart, Box box, bool legend) {
  Title(chart.title, &box);
  double names_width = 0;
  std::vector<double> sums;
  for (const BarChart::Row& row : chart.rows) {
    names_width = std::max(names_width, TextWidth(row.name, 11));
    sums.push_back(SumOf(row));
    sums.insert(sums.end(), row.range.begin(), row.range.end());
  }
  if (legend) {
    box.top += Legend({box.left + 16, box.top, box.right - 14, 0},
                      LegendOf(std::vector<AnyChart>{chart}), false);
  }
  box.left += names_width + 18;
  box.right -= 14;
  box.bottom -= 48;
  Axis x(sums, false);
  x.Place(box.left, box.right - 44);  // room for the sum after the longest bar
  XTicks({box.left, box.top, box.right - 44, box.bottom}, x, {}, chart.x_label, true);
  if (!chart.rows.empty()) Bars(chart, box, x);
}

}  // namespace

Drawing Draw(const Figure& figure) {
  const auto count = static_cast<int>(figure.panels.size());
  const int columns = std::max(1, std::min(figure.columns, count));
  const int rows = (count + columns - 1) / columns;
  Drawing drawing;
  drawing.width = columns * figure.panel_width + 10;
  Painter painter(&drawing);
  double top = 14;
  painter.Text({drawing.width / 2, top + 14}, figure.title, {17, Anchor::kMiddle});
  top += 24;
  for (const std::string& line : figure.subtitle) {
    painter.Text({drawing.width / 2, top + 12}, line, {11, Anchor::kMiddle, kGray});
    top += 16;
  }
  top += 10;
  const auto same_names = [&figure](const auto& panel) {
    return NamesOf(panel) == NamesOf(figure.panels.front()) &&
           panel.index() == figure.panels.front().index();
  };
  const bool shared =
      count > 1 && std::all_of(figure.panels.begin(), figure.panels.end(), same_names);
  if (shared) {
    const bool lines = std::holds_alternative<LineChart>(figure.panels.front());
    top += painter.Legend({20, top, drawing.width - 20, 0}, LegendOf(figure.panels), lines);
  }
  for (int n = 0; n < count; ++n) {
    const double left = 5 + (n % columns) * figure.panel_width;
    const double above = top + n / columns * (figure.panel_height + 8);
    const Box box = {left, above, left + figure.panel_width, above + figure.panel_height};
    std::visit([&](const auto& chart) { painter.Panel(chart, box, !shared); },
               figure.panels[static_cast<size_t>(n)]);
  }
  drawing.height = top + rows * (figure.panel_height + 8) + 2;
  return drawing;
}

}  // namespace attend::client
