// SPDX-License-Identifier: Apache-2.0
//
// Drawings as PNG: FreeType fills every outline, libpng packs the pixels.

#include <png.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <numbers>
#include <span>

#include "client/plot/drawing.h"
#include "client/plot/font.h"

#include FT_OUTLINE_H
#include FT_STROKER_H

namespace attend::client {
namespace {

constexpr double kSideMax = 1 << 15;

// FreeType fails for lack of memory only, as all outlines are made here.
void Check(FT_Error error) {
  if (error != 0) throw std::bad_alloc();
}

class Canvas {
 public:
  Canvas(int width, int height, double scale)
      : width_(width),
        height_(height),
        scale_(scale),
        rgb_(size_t(width) * size_t(height) * 3, 255) {
    Check(FT_Stroker_New(font_.library(), &stroker_));
  }
  ~Canvas() { FT_Stroker_Done(stroker_); }
  Canvas(const Canvas&) = delete;
  Canvas& operator=(const Canvas&) = delete;

  const std::vector<uint8_t>& rgb() const { return rgb_; }

  void operator()(const Area& area) { Fill(area.points, area.color, area.opacity); }
  void operator()(const Disc& disc) {
    constexpr int kCorners = 40;
    std::vector<Point> points;
    for (int i = 0; i < kCorners; ++i) {
      const double angle = 2 * std::numbers::pi * i / kCorners;
      points.push_back({disc.center.x + disc.radius * std::cos(angle),
                        disc.center.y + disc.radius * std::sin(angle)});
    }
    Fill(points, disc.color, 1);
  }
  void operator()(const Line& line) {
    FT_Stroker_Set(stroker_, static_cast<FT_Fixed>(line.pen.width * scale_ * 32),
                   FT_STROKER_LINECAP_BUTT, FT_STROKER_LINEJOIN_ROUND, 0);
    for (const std::vector<Point>& dash : Dashes(line)) Stroke(dash, line.pen.color);
  }
  void operator()(const Words& words);

 private:
  FT_Vector At(const Point& p) const {
    return {std::lround(p.x * scale_ * 64), std::lround((height_ - p.y * scale_) * 64)};
  }
  static std::vector<std::vector<Point>> Dashes(const Line& line);
  void Fill(const std::vector<Point>& points, Color color, double opacity);
  void Stroke(const std::vector<Point>& points, Color color);
  void Render(FT_Outline* outline, Color color, double opacity);
  static void PaintSpans(int y, int count, const FT_Span* spans, void* user);

  const int width_, height_;
  const double scale_;
  std::vector<uint8_t> rgb_;
  Font font_;
  FT_Stroker stroker_ = nullptr;
  Color color_ = kInk;  // of what is being filled
  double opacity_ = 1;
};

// A line's drawn pieces.
std::vector<std::vector<Point>> Canvas::Dashes(const Line& line) {
  if (line.pen.dashes.empty() || line.points.empty()) return {line.points};
  std::vector<std::vector<Point>> pieces = {{line.points.front()}};
  size_t dash = 0;
  double left = line.pen.dashes[0];
  for (size_t i = 1; i < line.points.size(); ++i) {
    Point from = line.points[i - 1];
    const Point to = line.points[i];
    for (;;) {
      const double length = std::hypot(to.x - from.x, to.y - from.y);
      if (length <= left) {
        left -= length;
        if (dash % 2 == 0) pieces.back().push_back(to);
        break;
      }
      from = {from.x + (to.x - from.x) * left / length, from.y + (to.y - from.y) * left / length};
      if (dash % 2 == 0) {
        pieces.back().push_back(from);
      } else {
        pieces.push_back({from});
      }
      left = std::max(0.1, line.pen.dashes[++dash % line.pen.dashes.size()]);
    }
  }
  return pieces;
}

void Canvas::PaintSpans(int y, int count, const FT_Span* spans, void* user) {
  Canvas& canvas = *static_cast<Canvas*>(user);
  uint8_t* const row = &canvas.rgb_[size_t(canvas.height_ - 1 - y) * size_t(canvas.width_) * 3];
  for (const FT_Span& span : std::span(spans, static_cast<size_t>(count))) {
    const double share = canvas.opacity_ * span.coverage / 255;
    for (int x = span.x; x < span.x + span.len; ++x) {
      for (int channel = 0; channel < 3; ++channel) {
        uint8_t& value = row[x * 3 + channel];
        const double ink = canvas.color_ >> (16 - 8 * channel) & 0xFF;
        value = static_cast<uint8_t>(std::lround(value + (ink - value) * share));
      }
    }
  }
}

void Canvas::Render(FT_Outline* outline, Color color, double opacity) {
  color_ = color;
  opacity_ = opacity;
  FT_Raster_Params params = {};
  params.flags = FT_RASTER_FLAG_AA | FT_RASTER_FLAG_DIRECT | FT_RASTER_FLAG_CLIP;
  params.gray_spans = PaintSpans;
  params.user = this;
  params.clip_box = {0, 0, width_, height_};
  Check(FT_Outline_Render(font_.library(), outline, &params));
}

void Canvas::Fill(const std::vector<Point>& points, Color color, double opacity) {
  if (points.empty() || points.size() > INT16_MAX) return;
  std::vector<FT_Vector> vectors;
  for (const Point& point : points) vectors.push_back(At(point));
  std::vector<char> tags(points.size(), FT_CURVE_TAG_ON);
  short end = static_cast<short>(points.size() - 1);
  FT_Outline outline = {};
  outline.n_contours = 1;
  outline.n_points = static_cast<short>(points.size());
  outline.points = vectors.data();
  outline.tags = tags.data();
  outline.contours = &end;
  Render(&outline, color, opacity);
}

void Canvas::Stroke(const std::vector<Point>& points, Color color) {
  if (points.size() < 2) return;
  FT_Vector begin = At(points.front());
  Check(FT_Stroker_BeginSubPath(stroker_, &begin, /*open=*/1));
  for (size_t i = 1; i < points.size(); ++i) {
    FT_Vector to = At(points[i]);
    Check(FT_Stroker_LineTo(stroker_, &to));
  }
  Check(FT_Stroker_EndSubPath(stroker_));
  FT_UInt count = 0, contours = 0;
  Check(FT_Stroker_GetCounts(stroker_, &count, &contours));
  FT_Outline outline;
  Check(FT_Outline_New(font_.library(), count, static_cast<FT_Int>(contours), &outline));
  outline.n_points = 0;
  outline.n_contours = 0;
  FT_Stroker_Export(stroker_, &outline);
  Render(&outline, color, 1);
  FT_Outline_Done(font_.library(), &outline);
  FT_Stroker_Rewind(stroker_);
}

void Canvas::operator()(const Words& words) {
  const double size = words.style.size;
  double along = 0;
  if (words.style.anchor != Anchor::kStart) {
    along = -TextWidth(words.text, size) * (words.style.anchor == Anchor::kEnd ? 1 : 0.5);
  }
  const auto pixels = static_cast<FT_F26Dot6>(std::lround(size * scale_ * 64));
  Check(FT_Set_Char_Size(font_.face(), pixels, pixels, 72, 72));
  for (const char32_t letter : Letters(words.text)) {
    const FT_UInt glyph = FT_Get_Char_Index(font_.face(), letter);
    Check(FT_Load_Glyph(font_.face(), glyph, FT_LOAD_NO_HINTING | FT_LOAD_NO_BITMAP));
    FT_Outline* const outline = &font_.face()->glyph->outline;
    Point at = {words.at.x + along, words.at.y};
    if (words.style.upward) {
      FT_Matrix turn = {0, -0x10000, 0x10000, 0};
      FT_Outline_Transform(outline, &turn);
      at = {words.at.x, words.at.y - along};
    }
    const FT_Vector place = At(at);
    FT_Outline_Translate(outline, place.x, place.y);
    Render(outline, words.style.color, 1);
    along += size * font_.Advance(letter);
  }
}

}  // namespace

Result<std::string> PngOf(const Drawing& drawing, double scale) {
  const double width = std::ceil(drawing.width * scale), height = std::ceil(drawing.height * scale);
  if (!(width >= 1 && width <= kSideMax && height >= 1 && height <= kSideMax)) {
    return InvalidArgument("a picture of " + std::to_string(width) + " x " +
                           std::to_string(height) + " pixels: sides must be in [1, 32768]");
  }
  Canvas canvas(static_cast<int>(width), static_cast<int>(height), scale);
  for (const auto& item : drawing.items) std::visit(canvas, item);
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width);
  image.height = static_cast<png_uint_32>(height);
  image.format = PNG_FORMAT_RGB;
  png_alloc_size_t bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string png(bytes, '\0');
  if (png_image_write_to_memory(&image, png.data(), &bytes, 0, canvas.rgb().data(), 0, nullptr) ==
      0) {
    return Internal(std::string("libpng: ") + image.message);
  }
  png.resize(bytes);
  return png;
}

}  // namespace attend::client
