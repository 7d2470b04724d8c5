// SPDX-License-Identifier: Apache-2.0
//
// Result files: read back, compared and drawn.

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

TEST(LoadFile, RoundTrips) {
  const LoadFile file = FileOf("a.json", {StepOf(4, {100, 110, 90}, 2'000'000)});
  EXPECT_EQ(file.Setting("host.name"), "a-host");
  EXPECT_EQ(file.Setting("host.cores"), "4");
  EXPECT_EQ(file.Setting("options.discard_output"), "false");
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

TEST(LoadFile, FilesThatAreNoResultsAreRefusedByName) {
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

// One run per requests/s value, in windows that agree to a percent.
LoadRuns RunsOf(const std::vector<int64_t>& rates, int64_t latency_ns = 2'000'000) {
  LoadRuns runs;
  for (const int64_t rate : rates) {
    runs.push_back(FileOf("run" + std::to_string(runs.size()) + ".json",
                          {StepOf(1, {rate, rate + 1, rate - 1}, latency_ns)}));
  }
  return runs;
}

Verdict RateVerdict(const LoadRuns& before, const LoadRuns& after) {
  const Comparison comparison = Compare(before, after);
  EXPECT_THAT(comparison.differences, SizeIs(3));
  return comparison.differences.at(0).verdict;
}

TEST(Compare, ADifferenceNeedsSeveralRuns) {
  const LoadRuns before = RunsOf({200, 240, 220});
  EXPECT_EQ(RateVerdict(before, RunsOf({241, 300, 260})), Verdict::kHigher);
  EXPECT_EQ(RateVerdict(before, RunsOf({199, 150, 160})), Verdict::kLower);
  EXPECT_EQ(RateVerdict(before, RunsOf({240, 300, 260})), Verdict::kOverlap);
  EXPECT_EQ(RateVerdict(before, RunsOf({300, 301})), Verdict::kFewRuns);
  EXPECT_EQ(RateVerdict(before, RunsOf({300})), Verdict::kFewRuns);
  const Comparison comparison = Compare(before, RunsOf({300, 360, 330, 342}));
  const Difference& rate = comparison.differences.at(0);
  EXPECT_NEAR(rate.before.median, 220, 1e-9);
  EXPECT_NEAR(rate.after.median, 336, 1e-9);
  EXPECT_NEAR(rate.after.range->highest, 360, 1e-9);
}

// Seen in practice: two runs of one program, each in narrow windows, 5 % apart.
TEST(Compare, OneRunEachShowsNoDifference) {
  const LoadRuns before = RunsOf({200}), after = RunsOf({210});
  EXPECT_EQ(RateVerdict(before, after), Verdict::kBeyondWindows);
  EXPECT_EQ(RateVerdict(before, RunsOf({201})), Verdict::kWithinWindows);
  EXPECT_EQ(RateVerdict(before, {FileOf("b.json", {StepOf(1, {500, 500}, 1'000)})}),
            Verdict::kFewWindows);
  const std::string table = ComparisonTable(before, after, Compare(before, after));
  EXPECT_THAT(table, AllOf(HasSubstr("beyond the windows' range; run-to-run noise unknown"),
                           Not(HasSubstr("higher")), Not(HasSubstr("lower"))));
}

TEST(Compare, AP99NeedsAHundredAnswersPerWindow) {
  const auto p99 = [](int64_t rate) {
    return Compare(RunsOf({rate, rate, rate}), RunsOf({rate, rate, rate}, 1'000'000))
        .differences.at(2);
  };
  EXPECT_EQ(p99(101).figure, "p99 ms");
  EXPECT_EQ(p99(101).verdict, Verdict::kLower);
  EXPECT_EQ(p99(100).verdict, Verdict::kFewAnswers) << "one window has 99";
}

TEST(Compare, UnstableMeasurementsHaveNoVerdict) {
  LoadOptions options = Options();
  options.stability = StabilityRule{.percent = 10};
  LoadRuns before = RunsOf({200, 240, 220});
  LoadResult unstable = StepOf(1, {200, 100, 300}, 2'000'000);
  before.push_back(FileOf("unstable.json", {unstable}, options));
  const LoadRuns after = RunsOf({400, 401, 402});
  const Comparison comparison = Compare(before, after);
  for (const Difference& difference : comparison.differences) {
    EXPECT_EQ(difference.verdict, Verdict::kNotStable) << difference.figure;
  }
  EXPECT_THAT(ComparisonTable(before, after, comparison), HasSubstr("NOT STABLE"));
  unstable.stable = true;
  before.back() = FileOf("stable.json", {unstable}, options);
  EXPECT_EQ(RateVerdict(before, after), Verdict::kHigher);
}

TEST(Compare, DifferentSettingsAreNamed) {
  LoadOptions options = Options();
  options.stream = true;
  options.check_share = 1;
  options.discard_output = true;
  options.pool = 1;
  options.arrivals = Arrivals::kConstant;
  options.warmup_s = 3;
  options.tenant = "a-tenant";
  options.facts.host = {"a-host", "another cpu", 8, "Linux"};
  options.facts.started = "2027-01-31T23:59:59Z";
  const LoadResult step = StepOf(1, {100, 110, 90}, 2'000'000);
  const LoadRuns before = {FileOf("a.json", {step}), FileOf("b.json", {step})};
  const LoadRuns after = {FileOf("c.json", {step}, options), FileOf("d.json", {step})};
  EXPECT_THAT(
      Compare(before, after).settings,
      ::testing::UnorderedElementsAre(
          "method: Attend | AttendStream, Attend", "transport: auto | inline, auto",
          "arrivals: poisson | constant, poisson", "warmup_s: 1.0 | 3.0, 1.0",
          "options.check_share: 0.0 | 1.0, 0.0", "options.discard_output: false | true, false",
          "options.pool: 4 | 1, 4", "options.tenant: none | a-tenant, none",
          "host.cpu: a cpu | another cpu, a cpu", "host.cores: 4 | 8, 4"));
  EXPECT_THAT(Compare(before, before).settings, SizeIs(0));
}

TEST(Compare, TheTableNamesSameAndDifferentSettings) {
  LoadOptions options = Options();
  options.stream = true;
  const LoadRuns before = {
      FileOf("a.json", {StepOf(1, {100, 110, 90}, 2'000'000), StepOf(2, {9, 9, 9}, 1'000)})};
  const LoadRuns after = {FileOf(
      "b.json", {StepOf(1, {150, 160, 140}, 2'000'000), StepOf(4, {9, 9, 9}, 1'000)}, options)};
  const Comparison comparison = Compare(before, after);
  EXPECT_THAT(comparison.missing, SizeIs(2));
  EXPECT_NEAR(comparison.differences[0].ratio(), 1.5, 1e-9);
  const std::string table = ComparisonTable(before, after, comparison);
  for (const char* words :
       {"closed x2 is not in b.json", "closed x4 is not in a.json", "1.500", "90 - 110",
        "140 - 160", "not the same: method: Attend | AttendStream", "A: a.json, 2026-01-31"}) {
    EXPECT_THAT(table, HasSubstr(words));
  }
}

TEST(LoadPlot, SeveralStepsAreDrawnOverTheLoadAndOneOverTime) {
  const LoadResult one = StepOf(1, {100, 110, 90}, 2'000'000);
  const LoadResult eight = StepOf(8, {300, 310, 290}, 5'000'000);
  const std::string load = SvgOf(Draw(LoadFigure(FileOf("a.json", {one, eight}))));
  for (const char* words :
       {"Latency against rate", "Throughput", "Where the time goes", "Histogram", ">x8<",
        "requests/s answered", "latency, ms", ">p99<", "network and client", "B1,H8,L128,D64"}) {
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

TEST(LoadPlot, APercentileNeedsEnoughAnswersToDifferFromTheMaximum) {
  const std::string few = SvgOf(Draw(LoadFigure(FileOf("a.json", {StepOf(1, {60, 70}, 1000)}))));
  EXPECT_THAT(few, AllOf(HasSubstr(">p90<"), HasSubstr(">max<"), Not(HasSubstr(">p99<"))));
  const std::string many =
      SvgOf(Draw(LoadFigure(FileOf("a.json", {StepOf(1, {1000, 1000}, 1000)}))));
  EXPECT_THAT(many, AllOf(HasSubstr(">p99<"), HasSubstr(">p99.9<"), Not(HasSubstr(">max<"))));
}

// A step without any answer in time is the one that matters.
TEST(LoadPlot, WithDeadlinesTheThroughputIsTheGoodput) {
  LoadOptions options = Options();
  options.deadline_ms = 40;
  LoadResult some = StepOf(0, {100, 110, 90}, 2'000'000), none = StepOf(0, {0, 0, 0}, 1);
  some.step = {0, 100};
  none.step = {0, 1000};
  none.stats.by_code = {{Code::kResourceExhausted, 2700}, {Code::kDeadlineExceeded, 300}};
  const LoadFile file = FileOf("a.json", {some, none}, options);
  EXPECT_DOUBLE_EQ(file.steps[1].refused_per_s, 900);
  EXPECT_DOUBLE_EQ(file.steps[1].late_per_s, 100);
  const std::string svg = SvgOf(Draw(LoadFigure(file)));
  for (const char* words : {"Goodput, deadlines of 40", "in time", "refused", "too late", ">1k<"}) {
    EXPECT_THAT(svg, HasSubstr(words));
  }
}

TEST(LoadPlot, ABarsPartsAddUpToTheCallsTime) {
  std::array<double, kPhases> mean = {};
  mean[kReceive] = 0.5;
  mean[kQueue] = 1;
  mean[kKernel] = 4;
  mean[kCopyIn] = 2;
  mean[kTotal] = 9;
  mean[kNetwork] = 3;
  EXPECT_EQ(BarParts(mean), (std::vector<double>{0.5, 1, 2, 4, 0, 1.5, 3}));
  EXPECT_EQ(BarParts(mean).size(), BarPhases().size());
  mean[kTotal] = 3.75;  // half of the phases' sum: they ran at the same time
  EXPECT_EQ(BarParts(mean), (std::vector<double>{0.25, 0.5, 1, 2, 0, 0, 3}));
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
