// SPDX-License-Identifier: Apache-2.0
//
// Files of results: what is read back, compared and drawn.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/load/compare.h"
#include "client/load/load_plot.h"

namespace attend::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

LoadOptions Options() {
  LoadOptions options;
  options.mix = {*ParseCallSpec("B1,H8,L128,D64")};
  options.facts.tool_version = "1.2.3";
  options.facts.command = "attend-client load";
  options.facts.started = "2026-01-31T23:59:59Z";
  options.facts.host = {"a-host", "a cpu", 4, "Linux"};
  options.facts.server = {"1.2.4", "gcc", {{"cpu", "a cpu", 1, 4}}, {"cpu_flash"}};
  return options;
}

// A step whose windows have these numbers of answers, each answered after latency_ns.
LoadResult StepOf(int64_t concurrency, const std::vector<int64_t>& windows, int64_t latency_ns) {
  LoadResult result;
  result.step = {concurrency, 0};
  for (const int64_t count : windows) {
    WindowResult window;
    window.start_s = result.elapsed_s;
    window.elapsed_s = 1;
    window.ok = count;
    for (int64_t i = 0; i < count; ++i) window.latency.Record(latency_ns);
    result.elapsed_s += 1;
    result.stats.window_ok += count;
    result.stats.from_intended.Merge(window.latency);
    result.stats.from_sent.Merge(window.latency);
    result.windows.push_back(std::move(window));
  }
  PhaseTimings timings;
  timings.kernel_ns = latency_ns / 2;
  timings.total_ns = latency_ns * 3 / 4;
  result.stats.AddPhases(timings, latency_ns);
  result.stats.sent = result.stats.by_code[Code::kOk] = result.stats.window_ok;
  return result;
}

LoadFile FileOf(const std::string& name, const std::vector<LoadResult>& results,
                const LoadOptions& options = Options()) {
  Result<LoadFile> file = ParseLoadFile(name, LoadJson(options, results));
  EXPECT_TRUE(file.ok()) << file.status().ToString();
  return file.ok() ? *file : LoadFile{};
}

TEST(LoadFile, ReadsWhatWasWritten) {
  const LoadFile file = FileOf("a.json", {StepOf(4, {100, 110, 90}, 2'000'000)});
  EXPECT_EQ(file.Setting("client host"), "a-host");
  EXPECT_EQ(file.Setting("server version"), "1.2.4");
  EXPECT_EQ(file.shapes, "B1,H8,L128,D64");
  ASSERT_THAT(file.steps, SizeIs(1));
  const FileStep& step = file.steps[0];
  EXPECT_EQ(step.step.concurrency, 4);
  EXPECT_EQ(step.requests_per_s, 100);
  EXPECT_EQ(step.latency.count, 300);
  EXPECT_NEAR(step.latency.p50_ms, 2, 2.0 / 128);
  EXPECT_NEAR(step.phase_mean_ms[kKernel], 1, 1e-9);
  EXPECT_NEAR(step.phase_mean_ms[kNetwork], 0.5, 1e-9);
  EXPECT_THAT(step.windows, SizeIs(3));
  ASSERT_THAT(step.histogram, SizeIs(1));
  EXPECT_EQ(step.histogram[0].count, 300);
  EXPECT_FALSE(step.judged);
}

TEST(LoadFile, WhatIsNoneIsNamed) {
  const std::string good = LoadJson(Options(), {StepOf(4, {100}, 1000)});
  auto other = nlohmann::json::parse(good);
  other["schema"] = "attend-load/2";
  auto lacking = nlohmann::json::parse(good);
  lacking["steps"][0].erase("elapsed_s");
  for (const auto& [text, words] : {std::pair<std::string, std::string>{"", "parse error"},
                                    {"{}", "schema"},
                                    {other.dump(), "attend-load/2"},
                                    {lacking.dump(), "elapsed_s"}}) {
    const Result<LoadFile> file = ParseLoadFile("x.json", text);
    ASSERT_FALSE(file.ok());
    EXPECT_THAT(file.status().message(), AllOf(HasSubstr("x.json"), HasSubstr(words)));
  }
  EXPECT_THAT(ReadLoadFile("/nonexistent.json").status().message(), HasSubstr("/nonexistent.json"));
}

TEST(Compare, OnlyWindowsApartAreADifference) {
  const LoadFile before = FileOf("a.json", {StepOf(1, {100, 110, 90}, 2'000'000)});
  const auto verdict = [&](const std::vector<int64_t>& windows, int64_t latency_ns) {
    const Comparison c = Compare(before, FileOf("b.json", {StepOf(1, windows, latency_ns)}));
    EXPECT_THAT(c.differences, SizeIs(3));
    return std::pair{c.differences[0].verdict, c.differences[1].verdict};
  };
  EXPECT_EQ(verdict({109, 120, 115}, 2'000'000), std::pair(Verdict::kNoise, Verdict::kNoise));
  EXPECT_EQ(verdict({111, 120, 115}, 1'000'000), std::pair(Verdict::kHigher, Verdict::kLower));
  EXPECT_EQ(verdict({80, 89, 85}, 3'000'000), std::pair(Verdict::kLower, Verdict::kHigher));
  EXPECT_EQ(verdict({500, 500}, 1'000), std::pair(Verdict::kUnknown, Verdict::kUnknown));
}

TEST(Compare, TheTableSaysWhatIsAndWhatIsNotTheSame) {
  LoadOptions options = Options();
  options.stream = true;
  const LoadFile before =
      FileOf("a.json", {StepOf(1, {100, 110, 90}, 2'000'000), StepOf(2, {9, 9, 9}, 1'000)});
  const LoadFile after = FileOf(
      "b.json", {StepOf(1, {150, 160, 140}, 2'000'000), StepOf(4, {9, 9, 9}, 1'000)}, options);
  const Comparison comparison = Compare(before, after);
  EXPECT_THAT(comparison.settings,
              ::testing::ElementsAre("method: Attend | AttendStream", "transport: auto | inline"));
  EXPECT_THAT(comparison.missing, SizeIs(2));
  EXPECT_NEAR(comparison.differences[0].ratio(), 1.5, 1e-9);
  EXPECT_NEAR(*comparison.differences[0].noise_before, 10, 1e-9);
  const std::string table = ComparisonTable(before, after, comparison);
  for (const char* words : {"closed x2 is in a.json only", "closed x4 is in b.json only", "1.500",
                            "10.0 %", "  higher", "  within noise", "not the same: method"}) {
    EXPECT_THAT(table, HasSubstr(words));
  }
}

TEST(LoadPlot, SeveralStepsAreDrawnOverTheLoadOneOverTime) {
  const LoadResult one = StepOf(1, {100, 110, 90}, 2'000'000);
  const LoadResult eight = StepOf(8, {300, 310, 290}, 5'000'000);
  const std::string load = SvgOf(Draw(LoadFigure(FileOf("a.json", {one, eight}))));
  for (const char* words :
       {"Latency against rate", "Throughput", "Where the time goes", "Histogram", ">x8<",
        "requests/s answered", "latency, ms", "p99.9", "network and client", "B1,H8,L128,D64"}) {
    EXPECT_THAT(load, HasSubstr(words));
  }
  const std::string time = SvgOf(Draw(LoadFigure(FileOf("a.json", {one}))));
  EXPECT_THAT(time, AllOf(HasSubstr("Latency by window"), HasSubstr("Throughput by window"),
                          Not(HasSubstr("against rate"))));
  for (const std::string& svg :
       {load, time, SvgOf(Draw(LoadFigure(FileOf("a.json", {})))),
        SvgOf(Draw(LoadFigure(FileOf("a.json", {StepOf(3, {0, 0, 0}, 1)}))))}) {
    EXPECT_THAT(svg, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf\""))));
  }
  const LoadFile file = FileOf("here/a.json", {one, eight});
  EXPECT_THAT(SvgOf(Draw(ComparisonFigure({file, file}))), HasSubstr(">a.json p99<"));
}

TEST(LoadPlot, ABarsPartsAddUpToTheCall) {
  std::array<double, kPhases> mean = {};
  mean[kReceive] = 0.5;
  mean[kQueue] = 1;
  mean[kKernel] = 4;
  mean[kCopyIn] = 2;
  mean[kTotal] = 9;
  mean[kNetwork] = 3;
  EXPECT_EQ(BarParts(mean), (std::vector<double>{0.5, 1, 2, 4, 0, 1.5, 3}));
  EXPECT_EQ(BarParts(mean).size(), BarPhases().size());
}

TEST(RunFacts, TimesAndCommandsAreReadable) {
  EXPECT_EQ(UtcText(0), "1970-01-01T00:00:00Z");
  EXPECT_EQ(UtcText(1769903999), "2026-01-31T23:59:59Z");
  EXPECT_EQ(ShellText({"attend-client", "--shape", "B1,H8", "it's", ""}),
            "attend-client --shape B1,H8 'it'\\''s' ''");
  EXPECT_GE(ThisHost().cores, 1);
}

}  // namespace
}  // namespace attend::client
