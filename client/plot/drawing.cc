// SPDX-License-Identifier: Apache-2.0

#include "client/plot/drawing.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace attend::client {
namespace {

// "12.5", "12": a tenth of a pixel is precise enough.
std::string Num(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  std::string number = text;
  if (number.ends_with(".0")) number.resize(number.size() - 2);
  return number == "-0" ? "0" : number;
}

std::string Hex(Color color) {
  char text[16];
  std::snprintf(text, sizeof text, "#%06x", color & 0xFFFFFFu);
  return text;
}

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (static_cast<unsigned char>(c) >= ' ') {  // XML allows no other control characters
      out += c;
    }
  }
  return out;
}

std::string Path(const std::vector<Point>& points) {
  std::string path;
  for (const Point& p : points) path += (path.empty() ? "M" : "L") + Num(p.x) + " " + Num(p.y);
  return path;
}

struct SvgWriter {
  std::string out;

  void operator()(const Line& line) {
    out += "<path d=\"" + Path(line.points) + "\" fill=\"none\" stroke=\"" + Hex(line.pen.color) +
           "\" stroke-width=\"" + Num(line.pen.width) + "\" stroke-linejoin=\"round\"";
    std::string dashes;
    for (const double dash : line.pen.dashes) dashes += (dashes.empty() ? "" : " ") + Num(dash);
    out += dashes.empty() ? "/>\n" : " stroke-dasharray=\"" + dashes + "\"/>\n";
  }
  void operator()(const Area& area) {
    out += "<path d=\"" + Path(area.points) + "Z\" fill=\"" + Hex(area.color) + "\"";
    out += area.opacity < 1 ? " fill-opacity=\"" + Num(area.opacity) + "\"/>\n" : "/>\n";
  }
  void operator()(const Disc& disc) {
    out += "<circle cx=\"" + Num(disc.center.x) + "\" cy=\"" + Num(disc.center.y) + "\" r=\"" +
           Num(disc.radius) + "\" fill=\"" + Hex(disc.color) + "\"/>\n";
  }
  void operator()(const Words& words) {
    static constexpr const char* kAnchors[] = {"start", "middle", "end"};
    const std::string x = Num(words.at.x), y = Num(words.at.y);
    out += "<text x=\"" + x + "\" y=\"" + y + "\" font-size=\"" + Num(words.style.size) +
           "\" text-anchor=\"" + kAnchors[static_cast<int>(words.style.anchor)] + "\" fill=\"" +
           Hex(words.style.color) + "\"";
    if (words.style.upward) out += " transform=\"rotate(-90 " + x + " " + y + ")\"";
    out += ">" + Escaped(words.text) + "</text>\n";
  }
};

}  // namespace

double TextWidth(const std::string& text, double size) {
  // Letters of DejaVu Sans, the widest of SvgOf's fonts, are 0.48 to 0.71 of the size wide on
  // average.
  constexpr double kLetter = 0.6;
  const auto letters = std::count_if(text.begin(), text.end(), [](char c) {
    return (c & 0xC0) != 0x80;  // not a continuation byte
  });
  return kLetter * size * static_cast<double>(letters);
}

void Drawing::Add(Line line) { items.emplace_back(std::move(line)); }
void Drawing::Add(Area area) { items.emplace_back(std::move(area)); }
void Drawing::Add(Disc disc) { items.emplace_back(disc); }
void Drawing::Add(Words words) { items.emplace_back(std::move(words)); }
void Drawing::AddBox(double left, double top, double right, double bottom, Color color) {
  Add(Area{{{left, top}, {right, top}, {right, bottom}, {left, bottom}}, color});
}

std::string SvgOf(const Drawing& drawing) {
  const std::string width = Num(drawing.width), height = Num(drawing.height);
  SvgWriter writer;
  writer.out = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + width + "\" height=\"" +
               height + "\" viewBox=\"0 0 " + width + " " + height +
               "\" font-family=\"DejaVu Sans, Verdana, Helvetica, sans-serif\">\n"
               "<rect width=\"" +
               width + "\" height=\"" + height + "\" fill=\"white\"/>\n";
  for (const auto& item : drawing.items) std::visit(writer, item);
  return writer.out + "</svg>\n";
}

Status CheckPictureName(const std::string& path) {
  if (path.ends_with(".svg")) return Status();
  return InvalidArgument(path + ": pictures are SVG, and their names must end in .svg");
}

Status WritePicture(const Drawing& drawing, const std::string& path) {
  ATTEND_RETURN_IF_ERROR(CheckPictureName(path));
  const std::string bytes = SvgOf(drawing);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  return file ? Status() : InvalidArgument(path + ": cannot be written");
}

}  // namespace attend::client
