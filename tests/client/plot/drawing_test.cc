// SPDX-License-Identifier: Apache-2.0
//
// The same drawing as SVG and as PNG: what is where, and in which color.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>

#include <cstring>
#include <limits>

#include "client/plot/chart.h"
#include "client/plot/drawing.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Pixels {
  int width = 0, height = 0;
  std::vector<uint8_t> rgb;
  uint32_t At(int x, int y) const {
    const uint8_t* p = &rgb[static_cast<size_t>(y * width + x) * 3];
    return static_cast<uint32_t>(p[0] << 16 | p[1] << 8 | p[2]);
  }
  // Pixels that are not white.
  int Inked(int left, int top, int right, int bottom) const {
    int count = 0;
    for (int y = top; y < bottom; ++y) {
      for (int x = left; x < right; ++x) count += At(x, y) != 0xFFFFFF;
    }
    return count;
  }
};

Pixels Decode(const std::string& png) {
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  EXPECT_NE(png_image_begin_read_from_memory(&image, png.data(), png.size()), 0) << image.message;
  image.format = PNG_FORMAT_RGB;
  Pixels pixels{static_cast<int>(image.width), static_cast<int>(image.height), {}};
  pixels.rgb.resize(PNG_IMAGE_SIZE(image));
  EXPECT_NE(png_image_finish_read(&image, nullptr, pixels.rgb.data(), 0, nullptr), 0);
  return pixels;
}

TEST(Drawing, ABoxFillsItsPixelsAndNoOthers) {
  Drawing drawing{20, 10, {}};
  drawing.AddBox(5, 2, 15, 8, 0x336699);
  for (const double scale : {1.0, 2.0}) {
    const Result<std::string> png = PngOf(drawing, scale);
    ASSERT_TRUE(png.ok());
    const Pixels pixels = Decode(*png);
    const int n = static_cast<int>(scale);
    EXPECT_EQ(pixels.width, 20 * n);
    EXPECT_EQ(pixels.height, 10 * n);
    EXPECT_EQ(pixels.At(5 * n, 2 * n), 0x336699u);
    EXPECT_EQ(pixels.At(15 * n - 1, 8 * n - 1), 0x336699u);
    EXPECT_EQ(pixels.Inked(0, 0, 20 * n, 10 * n), 60 * n * n);
  }
}

TEST(Drawing, LinesHaveTheirWidthAndDashes) {
  Drawing drawing{40, 20, {}};
  drawing.Add(Line{{{0, 5}, {40, 5}}, {0, 2, {}}});
  drawing.Add(Line{{{0, 15}, {40, 15}}, {0, 2, {6, 4}}});
  const Pixels pixels = Decode(*PngOf(drawing, 1));
  EXPECT_EQ(pixels.Inked(0, 0, 40, 10), 80);
  EXPECT_EQ(pixels.Inked(0, 10, 40, 20), 48) << "6 of 10 pixels";
  EXPECT_EQ(pixels.At(5, 15), 0u);
  EXPECT_EQ(pixels.At(7, 15), 0xFFFFFFu);
}

TEST(Drawing, WordsBeginEndOrAreCenteredAtTheirPlace) {
  const double width = TextWidth("Latency", 12);
  EXPECT_GT(width, 30);
  EXPECT_LT(width, 60);
  for (const auto& [anchor, left] : {std::pair{Anchor::kStart, 60.0},
                                     {Anchor::kMiddle, 60 - width / 2},
                                     {Anchor::kEnd, 60 - width}}) {
    Drawing drawing{120, 30, {}};
    drawing.Add(Words{{60, 20}, "Latency", {12, anchor}});
    const Pixels pixels = Decode(*PngOf(drawing, 1));
    const int from = static_cast<int>(left) - 1, to = static_cast<int>(left + width) + 2;
    EXPECT_GT(pixels.Inked(from, 8, to, 24), 60);
    EXPECT_EQ(pixels.Inked(0, 0, 120, 30), pixels.Inked(from, 8, to, 24));
  }
  Drawing upward{30, 120, {}};
  upward.Add(Words{{20, 60}, "Latency", {12, Anchor::kStart, kInk, true}});
  const Pixels pixels = Decode(*PngOf(upward, 1));
  EXPECT_EQ(pixels.Inked(0, 0, 30, 120), pixels.Inked(8, 60 - static_cast<int>(width) - 2, 24, 61));
}

TEST(Drawing, SvgKeepsWordsAsWords) {
  Drawing drawing{120, 30, {}};
  drawing.Add(Words{{60, 20}, "p99 < 2 ms & \x01 µs", {}});
  const std::string svg = SvgOf(drawing);
  EXPECT_THAT(svg, HasSubstr(">p99 &lt; 2 ms &amp;  µs</text>"));
  EXPECT_THAT(svg, HasSubstr("width=\"120\" height=\"30\""));
}

TEST(Drawing, SidesBeyondTheBoundAreRefused) {
  for (const double side : {0.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(PngOf({side, 10, {}}).status().code(), Code::kInvalidArgument) << side;
  }
}

TEST(Drawing, TheFilesNameSaysTheFormat) {
  EXPECT_TRUE(CheckPictureName("a.svg").ok());
  EXPECT_TRUE(CheckPictureName("a.png").ok());
  EXPECT_THAT(CheckPictureName("a.pdf").message(), HasSubstr(".svg or .png"));
  EXPECT_THAT(WritePicture({10, 10, {}}, "/nonexistent/a.svg").message(),
              HasSubstr("/nonexistent/a.svg"));
}

TEST(Chart, EveryNameUnitAndPointIsThere) {
  LineChart lines{"Latency", "requests/s", "ms", true, true, {}};
  lines.series = {{"p50", {{100, 1}, {200, 2}}, {"x1", "x2"}}, {"p99", {{100, 3}, {0, 4}}, {}}};
  BarChart bars{"Phases", "mean, ms", "ms", {"queue", "kernel"}, {{"x1", {0.5, 1.5}}}};
  const std::string svg = SvgOf(Draw({"Load", {"B1,H8"}, {lines, bars}}));
  for (const char* word : {"Load", "B1,H8", "Latency", "requests/s", ">ms<", "p50", "p99", "x1",
                           "x2", "Phases", "mean, ms", "queue", "kernel", "2 ms"}) {
    EXPECT_THAT(svg, HasSubstr(word));
  }
  size_t discs = 0;
  for (size_t at = svg.find("<circle"); at != std::string::npos; at = svg.find("<circle", at + 1)) {
    ++discs;
  }
  EXPECT_EQ(discs, 3u) << "a logarithmic axis has no 0";
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(Chart, PanelsWithTheSameNamesHaveOneLegend) {
  const BarChart bars{"a", "ms", "ms", {"kernel"}, {{"here", {1}}}};
  const std::string svg = SvgOf(Draw({"Two", {}, {bars, bars}}));
  EXPECT_EQ(svg.find(">kernel<"), svg.rfind(">kernel<"));
}

TEST(Chart, ABarShowsItsRange) {
  const auto lines = [](std::vector<double> range) {
    const BarChart bars{"a", "ms", "ms", {"kernel"}, {{"here", {2}, std::move(range)}}};
    const std::string svg = SvgOf(Draw({"One", {}, {bars}}));
    int count = 0;
    for (size_t at = svg.find("<path"); at != std::string::npos; at = svg.find("<path", at + 1)) {
      ++count;
    }
    return count;
  };
  EXPECT_EQ(lines({2, 1.5, 1.8}) - lines({}), 3) << "from end to end, and both ends";
}

TEST(Chart, EmptyOnesAreDrawnToo) {
  for (const Figure& figure :
       {Figure{"none", {}, {}}, Figure{"empty", {}, {LineChart{}, BarChart{}}}}) {
    const Drawing drawing = Draw(figure);
    EXPECT_TRUE(PngOf(drawing).ok());
    EXPECT_THAT(SvgOf(drawing), Not(HasSubstr("nan")));
  }
}

}  // namespace
}  // namespace attend::client
