// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "tests/bench/service/bench.h"
#include "tests/bench/service/report.h"
#include "tests/bench/service/rounds.h"
#include "tests/bench/service/scrape.h"
#include "tests/bench/service/work.h"

namespace attend::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Question Ask(Measure measure, std::optional<Target> target) {
  return {"row", "work", "rival", "GB/s", measure, target};
}
constexpr Target kAtLeastTwo{Target::Sense::kAtLeast, 2};
constexpr Target kAtMostTwo{Target::Sense::kAtMost, 2};

TEST(MedianTest, IsTheMiddleOrTheMeanOfTwo) {
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(Median({7}), 7);
  EXPECT_TRUE(std::isnan(Median({})));
}

TEST(PercentileTest, IsTheValueThatTheShareDoesNotExceed) {
  std::vector<double> hundred;
  for (int i = 100; i >= 1; --i) hundred.push_back(i);
  EXPECT_EQ(Percentile(hundred, 0.50), 50);
  EXPECT_EQ(Percentile(hundred, 0.99), 99);
  EXPECT_EQ(Percentile(hundred, 1.00), 100);
  EXPECT_EQ(Percentile(hundred, 0.00), 1);
  std::vector<double> none;
  EXPECT_EQ(Percentile(none, 0.5), 0);
}

// The ratio of the medians would be 10 / 4; the rounds' ratios are 2.5, 0.5 and 25.
TEST(JudgeTest, RatioIsTheMedianOfTheRoundsRatios) {
  const Figure figure = Judge(Ask(Measure::kRatio, kAtLeastTwo), {10, 2, 100}, {4, 4, 4});
  EXPECT_EQ(figure.attend, 10);
  EXPECT_EQ(figure.rival, 4);
  EXPECT_EQ(figure.result, 2.5);
  EXPECT_EQ(figure.verdict, Verdict::kMet);
  const Figure other = Judge(Ask(Measure::kRatio, kAtLeastTwo), {1, 8, 9}, {1, 2, 100});
  EXPECT_EQ(other.attend, 8);
  EXPECT_EQ(other.rival, 2);
  EXPECT_EQ(other.result, 1);
  EXPECT_EQ(other.verdict, Verdict::kMissed);
}

TEST(JudgeTest, DifferenceIsTheMedianOfTheRoundsDifferences) {
  const Figure figure = Judge(Ask(Measure::kDifference, kAtMostTwo), {5, 9, 7}, {4, 6, 0});
  EXPECT_EQ(figure.result, 3);
  EXPECT_EQ(figure.verdict, Verdict::kMissed);
  EXPECT_EQ(Judge(Ask(Measure::kDifference, kAtMostTwo), {5}, {6}).verdict, Verdict::kMet);
  EXPECT_EQ(Judge(Ask(Measure::kDifference, kAtMostTwo), {0}, {0}).verdict, Verdict::kMet);
}

TEST(JudgeTest, TheTargetItselfIsMet) {
  EXPECT_EQ(Judge(Ask(Measure::kRatio, kAtLeastTwo), {4}, {2}).verdict, Verdict::kMet);
  EXPECT_EQ(Judge(Ask(Measure::kRatio, kAtLeastTwo), {3.999}, {2}).verdict, Verdict::kMissed);
  EXPECT_EQ(Judge(Ask(Measure::kDifference, kAtMostTwo), {4}, {2}).verdict, Verdict::kMet);
  EXPECT_EQ(Judge(Ask(Measure::kRatio, std::nullopt), {4}, {2}).verdict, Verdict::kNone);
}

TEST(JudgeTest, AMissingValueFails) {
  const Question ratio = Ask(Measure::kRatio, kAtLeastTwo);
  EXPECT_EQ(Judge(ratio, {}, {}).verdict, Verdict::kFailed);
  EXPECT_EQ(Judge(ratio, {1, 2}, {1}).verdict, Verdict::kFailed);
  EXPECT_EQ(Judge(ratio, {1}, {0}).verdict, Verdict::kFailed);
  EXPECT_EQ(Judge(ratio, {std::nan("")}, {1}).verdict, Verdict::kFailed);
  EXPECT_EQ(Judge(ratio, {1}, {std::numeric_limits<double>::infinity()}).verdict, Verdict::kFailed);
}

TEST(TableTest, ShowsOnlyMeasuredValues) {
  std::vector<Figure> figures = {
      Judge(Ask(Measure::kRatio, Target{Target::Sense::kAtLeast, 0.9}), {0.896}, {1}),
      Judge(Ask(Measure::kDifference, kAtMostTwo), {130}, {120}),
      Skipped(Ask(Measure::kRatio, kAtLeastTwo), "needs a | GPU")};
  figures.push_back(Failed(Ask(Measure::kRatio, kAtLeastTwo), "wrong answer"));
  figures.back().attend = 12345;
  const std::string table = MarkdownTable(figures);
  EXPECT_THAT(table, HasSubstr("| 0.90 GB/s | 1.00 GB/s | 0.896x | >= 0.90x | missed |\n"));
  EXPECT_THAT(table, HasSubstr("| 130 GB/s | 120 GB/s | +10.0 GB/s | <= 2.00 GB/s | missed |\n"));
  EXPECT_THAT(table, HasSubstr("| | |  | >= 2.00x | skipped: needs a   GPU |\n"));
  EXPECT_THAT(table, HasSubstr("| failed: wrong answer |\n"));
  EXPECT_THAT(table, Not(HasSubstr("12345")));

  const nlohmann::json json = ToJson(figures);
  ASSERT_EQ(json.size(), 4u);
  EXPECT_EQ(json[0]["verdict"], "missed");
  EXPECT_EQ(json[0]["target"]["at_least"], 0.9);
  EXPECT_EQ(json[0]["attend_rounds"], nlohmann::json({0.896}));
  EXPECT_EQ(json[1]["measure"], "difference");
  EXPECT_EQ(json[2]["reason"], "needs a | GPU");
  EXPECT_FALSE(json[3].contains("attend"));
  EXPECT_FALSE(json[3].contains("result"));
}

TEST(RoundsTest, InterleavesTurnsAndDropsTheirWarmUp) {
  std::string order;
  const auto contestant = [&](char name) {
    return Contestant{std::string(1, name), [&order, name](double seconds) -> Result<Sample> {
                        order += name;
                        if (order.size() % 2 == 1) {
                          EXPECT_EQ(seconds, 1.0) << "before a turn";
                        }
                        Sample sample;
                        sample.calls = static_cast<int64_t>(order.size());
                        sample.seconds = seconds;
                        return sample;
                      }};
  };
  const std::vector<Contestant> contestants = {contestant('a'), contestant('b')};
  const Result<std::vector<Samples>> samples = RunRounds(contestants, 3, 2.0);
  ASSERT_TRUE(samples.ok());
  EXPECT_EQ(order, "aabbbbaaaabbbbaa");
  const auto calls = [](const Sample& sample) { return sample.calls_per_second(); };
  EXPECT_THAT(Values((*samples)[0], calls), ElementsAre(4, 5, 8));
  EXPECT_THAT(Values((*samples)[1], calls), ElementsAre(3, 6, 7));
}

TEST(RoundsTest, AnErrorOrAnEmptyTurnLeavesNoSamples) {
  const Contestant good{"good", [](double) { return Sample{1, 1, 1, 1, 1}; }};
  const Contestant wrong{"other", [](double) { return Internal("wrong answer"); }};
  const Contestant idle{"idle", [](double) { return Sample{0, 0, 1, 0, 0}; }};
  const std::vector<Contestant> with_wrong = {good, wrong};
  const std::vector<Contestant> with_idle = {good, idle};
  EXPECT_THAT(RunRounds(with_wrong, 3, 1).status().ToString(), HasSubstr("other: wrong answer"));
  EXPECT_THAT(RunRounds(with_idle, 3, 1).status().ToString(), HasSubstr("idle: no call ended"));
}

TEST(WantsTest, SelectsACellByItsWorkOrItsRival) {
  Options options;
  const Question question = Ask(Measure::kRatio, std::nullopt);
  EXPECT_TRUE(Bench(options).Wants(question));
  for (const char* text : {"wor", "rival", "work, rival"}) {
    options.cells = text;
    EXPECT_TRUE(Bench(options).Wants(question)) << text;
  }
  options.cells = "row";
  Bench bench(options);
  EXPECT_FALSE(bench.Wants(question));
  bench.AddWithout({question}, Internal("why"));
  bench.AddJudged(question, {Sample{1, 1, 1, 1, 1}}, {Sample{1, 1, 1, 1, 1}},
                  [](const Sample& sample) { return sample.seconds; });
  EXPECT_TRUE(bench.figures().empty());
}

TEST(MetricSumTest, AddsUpOneFamily) {
  const std::string text =
      "# HELP a_total many\na_total{x=\"1\"} 2\na_total{x=\"2\"} 3.5\na_total_more 7\nb 1\n";
  EXPECT_EQ(MetricSum(text, "a_total"), 5.5);
  EXPECT_EQ(MetricSum(text, "a_total", "x=\"2\""), 3.5);
  EXPECT_EQ(MetricSum(text, "a_total", "x=\"3\""), std::nullopt);
  EXPECT_EQ(MetricSum(text, "b"), 1);
  EXPECT_EQ(MetricSum(text, "c"), std::nullopt);
}

// A server's answer to `work` with this O.
grpc::ByteBuffer AnswerWith(const Work& work, const std::string& o) {
  v1::AttendResponse response;
  response.set_request_id("bench");
  for (const int64_t size : {1, 1, 16, 64}) response.mutable_o()->add_shape(size);
  response.mutable_timings()->set_kernel_ns(1000 + work.input_bytes() % 7);
  response.add_raw(o);
  grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

class WorkTest : public ::testing::Test {
 protected:
  static test::ProblemSpec Spec() { return test::MakeSpec(1, 1, 1, 16, 16, 64, 64); }
};

TEST_F(WorkTest, MessageIsTheRequest) {
  const Work work("w", Spec(), Truth::kAttention, 5);
  grpc::Slice slice;
  ASSERT_TRUE(work.Message("id7").DumpToSingleSlice(&slice).ok());
  v1::AttendRequest request;
  ASSERT_TRUE(request.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  EXPECT_EQ(request.request_id(), "id7");
  ASSERT_EQ(request.raw_size(), 3);
  EXPECT_EQ(request.raw(0).size() + request.raw(1).size() + request.raw(2).size(),
            static_cast<size_t>(work.input_bytes()));
  EXPECT_FALSE(request.return_lse());
}

// O of the pass-through device, which begins with the marks of Q, K and V.
std::string MarkedAnswer(const Work& work) {
  const Attention& a = work.owned().attention;
  std::string o(static_cast<size_t>(work.output_bytes()), 'x');
  o.replace(0, 16, static_cast<const char*>(a.q.data), 16);
  o.replace(16, 16, static_cast<const char*>(a.k.data), 16);
  o.replace(32, 16, static_cast<const char*>(a.v.data), 16);
  return o;
}

TEST_F(WorkTest, AcceptsOnlyRightAnswers) {
  Work marks("w", Spec(), Truth::kMarks, 5);
  std::string o(static_cast<size_t>(marks.output_bytes()), 'x');
  grpc::ByteBuffer bad = AnswerWith(marks, o);
  EXPECT_FALSE(marks.Admit(bad).ok());
  o = MarkedAnswer(marks);
  grpc::ByteBuffer good = AnswerWith(marks, o);
  ASSERT_TRUE(marks.Admit(good).ok());
  EXPECT_EQ(marks.answer_bytes(), static_cast<int64_t>(good.Length()));
  o[40] ^= 1;
  EXPECT_NE(marks.CheckAnswer(AnswerWith(marks, o), true), "");
  EXPECT_EQ(marks.CheckAnswer(AnswerWith(marks, o), false), "");  // checks only its length
  o[40] ^= 1;
  o[48] ^= 1;  // after the marks
  EXPECT_EQ(marks.CheckAnswer(AnswerWith(marks, o), true), "");
  EXPECT_EQ(marks.CheckAnswer(AnswerWith(marks, o.substr(1)), false), "O has a wrong size");

  Work values("w", Spec(), Truth::kAttention, 5);
  EXPECT_FALSE(values.Admit(good).ok());
}

TEST_F(WorkTest, ReadsTheAnswersBytes) {
  Work marks("w", Spec(), Truth::kMarks, 5);
  std::string o = MarkedAnswer(marks);
  grpc::ByteBuffer inlined = AnswerWith(marks, o);
  ASSERT_TRUE(marks.Admit(inlined).ok());
  EXPECT_EQ(marks.CheckPlacedAnswer(inlined, o.data(), true), "O is not in its place");
  v1::AttendResponse response;
  response.mutable_o()->mutable_shared_memory()->set_region("r");
  grpc::Slice slice(response.SerializeAsString());
  const grpc::ByteBuffer placed(&slice, 1);
  EXPECT_EQ(marks.CheckPlacedAnswer(placed, o.data(), true), "");
  o[40] ^= 1;
  EXPECT_NE(marks.CheckPlacedAnswer(placed, o.data(), true), "");
  EXPECT_EQ(marks.CheckPlacedAnswer(placed, o.data(), false), "");
}

TEST_F(WorkTest, AFailureOnAStreamIsNotAnAnswer) {
  const Work work("w", Spec(), Truth::kMarks, 5);
  v1::AttendResponse response;
  response.mutable_status()->set_code(8);
  response.mutable_status()->set_message("the queue is full");
  grpc::Slice slice(response.SerializeAsString());
  const grpc::ByteBuffer answer(&slice, 1);
  EXPECT_EQ(work.CheckAnswer(answer, false), "code 8, the queue is full");
  EXPECT_EQ(work.CheckPlacedAnswer(answer, nullptr, true), "code 8, the queue is full");
}

}  // namespace
}  // namespace attend::bench
