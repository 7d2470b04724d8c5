// SPDX-License-Identifier: Apache-2.0
//
// A drawing as SVG: positions and colors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/plot/chart.h"
#include "client/plot/drawing.h"

namespace attend::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Drawing, EveryItemHasItsPositionAndColor) {
  Drawing drawing{40, 20, {}};
  drawing.AddBox(5, 2, 15.25, 8, 0x336699);
  drawing.Add(Line{{{0, 15}, {40, 15}}, {0xFF0000, 2, {6, 4}}});
  drawing.Add(Disc{{10, 5}, 3.2, 0x00FF00});
  const std::string svg = SvgOf(drawing);
  EXPECT_THAT(svg, HasSubstr("<path d=\"M5 2L15.2 2L15.2 8L5 8Z\" fill=\"#336699\"/>"));
  EXPECT_THAT(svg, HasSubstr("<path d=\"M0 15L40 15\" fill=\"none\" stroke=\"#ff0000\" "
                             "stroke-width=\"2\" stroke-linejoin=\"round\" "
                             "stroke-dasharray=\"6 4\"/>"));
  EXPECT_THAT(svg, HasSubstr("<circle cx=\"10\" cy=\"5\" r=\"3.2\" fill=\"#00ff00\"/>"));
}

TEST(Drawing, TextIsAlignedAndCanBeRotated) {
  for (const auto& [anchor, name] :
       {std::pair{Anchor::kStart, "start"}, {Anchor::kMiddle, "middle"}, {Anchor::kEnd, "end"}}) {
    Drawing drawing{120, 30, {}};
    drawing.Add(Words{{60, 20}, "Latency", {12, anchor}});
    EXPECT_THAT(SvgOf(drawing), HasSubstr("<text x=\"60\" y=\"20\" font-size=\"12\" "
                                          "text-anchor=\"" +
                                          std::string(name) + "\" fill=\"#222222\">Latency<"));
  }
  Drawing upward{30, 120, {}};
  upward.Add(Words{{20, 60}, "Latency", {12, Anchor::kStart, kInk, true}});
  EXPECT_THAT(SvgOf(upward), HasSubstr("transform=\"rotate(-90 20 60)\">Latency<"));
}

TEST(Drawing, TextWidthsAddUpTheirLetters) {
  EXPECT_DOUBLE_EQ(TextWidth("12 \u00b5s", 10), TextWidth("12 us", 10));
  EXPECT_DOUBLE_EQ(TextWidth("12 us", 20), 2 * TextWidth("12 us", 10));
  EXPECT_EQ(TextWidth("", 10), 0);
  EXPECT_NEAR(TextWidth("Latency", 12), 3.95 * 12, 4) << "its width in DejaVu Sans";
}

TEST(Drawing, SvgKeepsTextAsText) {
  Drawing drawing{120, 30, {}};
  drawing.Add(Words{{60, 20}, "p99 < 2 ms & \x01 µs", {}});
  const std::string svg = SvgOf(drawing);
  EXPECT_THAT(svg, HasSubstr(">p99 &lt; 2 ms &amp;  µs</text>"));
  EXPECT_THAT(svg, HasSubstr("width=\"120\" height=\"30\""));
}

TEST(Drawing, OtherFormatsThanSvgAreRefused) {
  EXPECT_TRUE(CheckPictureName("a.svg").ok());
  for (const char* name : {"a.png", "a.pdf", "svg", ""}) {
    EXPECT_EQ(CheckPictureName(name).message(),
              std::string(name) + ": pictures are SVG, and their names must end in .svg");
    EXPECT_FALSE(WritePicture({10, 10, {}}, name).ok());
  }
  EXPECT_THAT(WritePicture({10, 10, {}}, "/nonexistent/a.svg").message(),
              HasSubstr("/nonexistent/a.svg"));
}

int PathsIn(const std::string& svg) {
  int count = 0;
  for (size_t at = svg.find("<path"); at != std::string::npos; at = svg.find("<path", at + 1)) {
    ++count;
  }
  return count;
}

TEST(Chart, ShowsEveryNameUnitAndPoint) {
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
    return PathsIn(SvgOf(Draw({"One", {}, {bars}})));
  };
  EXPECT_EQ(lines({2, 1.5, 1.8}) - lines({}), 3) << "from end to end, and both ends";
}

TEST(Chart, PartsTooThinToBeSeenAreNotInTheLegend) {
  const BarChart here{"a", "ms", "ms", {"queue", "kernel"}, {{"x1", {0.0001, 1}}}};
  BarChart served = here;
  EXPECT_THAT(SvgOf(Draw({"One", {}, {here}})),
              AllOf(HasSubstr(">kernel<"), Not(HasSubstr(">queue<"))));
  served.rows[0].parts = {0.5, 0};
  EXPECT_THAT(SvgOf(Draw({"Two", {}, {here, served}})),
              AllOf(HasSubstr(">kernel<"), HasSubstr(">queue<")))
      << "panels that share a legend share its names";
}

TEST(Chart, APointShowsItsRange) {
  const auto lines = [](std::vector<std::vector<double>> ranges) {
    LineChart chart{"a", "x", "y", false, false, {}};
    chart.series = {{"p50", {{1, 2}, {2, 2}}, {}, false, std::move(ranges)}};
    return PathsIn(SvgOf(Draw({"One", {}, {chart}})));
  };
  EXPECT_EQ(lines({{1.5, 2, 1.8}, {}}) - lines({}), 3) << "from end to end, and both ends";
}

TEST(Chart, EmptyChartsAreDrawnToo) {
  for (const Figure& figure :
       {Figure{"none", {}, {}}, Figure{"empty", {}, {LineChart{}, BarChart{}}}}) {
    EXPECT_THAT(SvgOf(Draw(figure)), Not(HasSubstr("nan")));
  }
}

}  // namespace
}  // namespace attend::client
