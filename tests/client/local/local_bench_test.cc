// SPDX-License-Identifier: Apache-2.0
//
// Calls computed in this process: right answers, times on a manual clock, and the same shape
// against a server.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/local/local_bench.h"
#include "tests/client/support/fake_server.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

// Advances by a millisecond at every reading.
LocalCall::NowNs StepClock() {
  return [now = int64_t{0}]() mutable { return now += 1'000'000; };
}

TEST(LocalCall, AnswersAreRightForEveryTermAndLayout) {
  for (const char* shape :
       {"B2,H4,Hkv2,L70,D40", "B1,H2,L33,D64,dtype=float16,layout=blhd,causal,lse",
        "B3,H2,Lq1,Lk65,D32,Dv48,ragged,sinks,alibi", "B2,H2,L40,D16,layout=lhd,ragged,window=9:0",
        "B2,H2,L24,D16,bias,softcap=3", "B1,H2,L24,D16,bits,top-left,causal",
        "B2,H2,Lq9,Lk31,D16,ragged,tree=7", "B1,H2,L64,D16,dropout=0.3",
        "B1,H1,L20,D16,kernel=cpu_reference"}) {
    const Result<AttentionCall> call = MakeRandomCall(*ParseCallSpec(shape), 7);
    ASSERT_TRUE(call.ok()) << call.status().ToString();
    const auto local = LocalCall::Make(ATTEND_CPU, *call);
    ASSERT_TRUE(local.ok()) << shape << ": " << local.status().ToString();
    const Result<PhaseTimings> timings = (*local)->Run(StepClock());
    ASSERT_TRUE(timings.ok()) << shape << ": " << timings.status().ToString();
    EXPECT_EQ(timings->kernel_ns, 1'000'000);
    EXPECT_EQ(timings->total_ns, 3'000'000);
    const Result<RowsReport> report = VerifyAnswer(*call, (*local)->result(), 1);
    ASSERT_TRUE(report.ok()) << shape;
    EXPECT_TRUE(report->ok) << shape << ": " << report->detail;
  }
}

TEST(LocalCall, PartsOfTheKeysAreMaskedAsInTheWhole) {
  Result<AttentionCall> call = MakeRandomCall(*ParseCallSpec("B1,H2,Lq5,Lk24,D16,causal,alibi"), 7);
  ASSERT_TRUE(call.ok()) << call.status().ToString();
  call->mask.key_offset = 7;
  call->mask.keys_after = 3;
  const auto local = LocalCall::Make(ATTEND_CPU, *call);
  ASSERT_TRUE(local.ok()) << local.status().ToString();
  ASSERT_TRUE((*local)->Run(StepClock()).ok());
  const Result<RowsReport> report = VerifyAnswer(*call, (*local)->result(), 1);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_TRUE(report->ok) << report->detail;
}

TEST(LocalCall, UnsupportedCallsAreRefused) {
  const auto refused = [](const char* shape) {
    const Result<AttentionCall> call = MakeRandomCall(*ParseCallSpec(shape), 7);
    EXPECT_TRUE(call.ok());
    return LocalCall::Make(ATTEND_CPU, *call).status();
  };
  EXPECT_EQ(refused("B1,H1,L8,D8,backward").code(), Code::kUnimplemented);
  EXPECT_FALSE(refused("B1,H1,L8,D8,kernel=no_such").ok());
}

TEST(LocalCall, DevicesAreNamedAsTheServerNamesThem) {
  EXPECT_EQ(*ParseDevice("cpu"), ATTEND_CPU);
  for (const char* name : {"", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:0x", "cpu:0"}) {
    EXPECT_EQ(ParseDevice(name).status().code(), Code::kInvalidArgument) << name;
  }
  EXPECT_THAT(ParseDevice("cuda:4000").status().message(), HasSubstr("cuda:4000: there are "));
}

// Its calls take the clock's steps; the name records which way ran when.
class FakeWay final : public Way {
 public:
  FakeWay(std::string name, int64_t steps, std::string* log)
      : name_(std::move(name)), steps_(steps), log_(*log) {
    result_.kernel = "fake";
  }
  const std::string& name() const override { return name_; }
  const AttentionResult& result(size_t) const override { return result_; }
  Result<CallTime> Run(size_t n, const LocalCall::NowNs& now) override {
    log_ += name_ + std::to_string(n) + " ";
    const int64_t begin = now();
    for (int64_t i = 1; i < steps_; ++i) now();
    return CallTime{now() - begin, 250'000, {.kernel_ns = 500'000, .total_ns = 600'000}};
  }

 private:
  const std::string name_;
  const int64_t steps_;
  std::string& log_;
  AttentionResult result_;
};

LoadOptions OptionsFor(const char* shape) {
  LoadOptions options;
  options.mix = {*ParseCallSpec(shape)};
  options.warmup_s = 0;
  options.client.retry.attempts_max = 1;
  options.quiet = true;
  return options;
}

std::vector<AttentionCall> CallsOf(const LoadOptions& options, uint64_t inputs) {
  std::vector<AttentionCall> calls;
  for (uint64_t seed = 1; seed <= inputs; ++seed) {
    Result<AttentionCall> call = MakeRandomCall(options.mix.front(), seed);
    EXPECT_TRUE(call.ok()) << call.status().ToString();
    calls.push_back(std::move(*call));
  }
  return calls;
}

Result<std::vector<WayResult>> Bench(const LoadOptions& options, int64_t rounds,
                                     const std::vector<AttentionCall>& calls,
                                     const std::vector<std::unique_ptr<Way>>& ways) {
  const std::atomic<bool> interrupted{false};
  return BenchWays(options, rounds, calls, ways, interrupted, StepClock());
}

TEST(LocalBench, MeasuresWithTheGivenClock) {
  LoadOptions options = OptionsFor("B1,H1,L4,D8");
  options.warmup_s = 0.02;
  options.duration_s = 0.05;
  const std::vector<AttentionCall> calls = CallsOf(options, 2);
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(*MakeHere(ATTEND_CPU, calls));
  const Result<std::vector<WayResult>> results = Bench(options, 1, calls, ways);
  ASSERT_TRUE(results.ok()) << results.status().ToString();
  const WayResult& way = results->front();
  EXPECT_EQ(way.way, "here, cpu");
  EXPECT_EQ(way.kernel, "cpu_flash");
  EXPECT_EQ(way.latency.max(), 3'000'000);
  // A call and the preceding reading of the clock take 5 ms.
  EXPECT_EQ(way.latency.count(), 10);
  EXPECT_EQ(way.phase_mean_ms[kKernel], 1);
  EXPECT_EQ(way.client_mean_ms, 0);
  EXPECT_EQ(way.verified.passed, 2);
  EXPECT_FALSE(way.failed);
}

TEST(LocalBench, WaysAlternate) {
  LoadOptions options = OptionsFor("B1,H1,L4,D8");
  options.count = 5;
  const std::vector<AttentionCall> calls = CallsOf(options, 2);
  std::string log;
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(std::make_unique<FakeWay>("a", 1, &log));
  ways.push_back(std::make_unique<FakeWay>("b", 4, &log));
  const Result<std::vector<WayResult>> results = Bench(options, 3, calls, ways);
  ASSERT_TRUE(results.ok());
  EXPECT_EQ(log, "a0 a1 b0 b1 b0 b1 a0 a1 a0 b0 ");
  const WayResult &a = (*results)[0], &b = (*results)[1];
  EXPECT_EQ(a.latency.count(), 5);
  EXPECT_EQ(b.round_mean_ms, (std::vector<double>{4, 4, 4}));
  EXPECT_DOUBLE_EQ(b.client_mean_ms, 0.25);
  EXPECT_DOUBLE_EQ(b.phase_mean_ms[kNetwork], 4 - 0.25 - 0.6);
  EXPECT_EQ(BesideHere(b, a).median, 4);
}

TEST(LocalBench, ATurnMeasuresAtLeastOneCall) {
  LoadOptions options = OptionsFor("B1,H1,L4,D8");
  options.warmup_s = 0.001;
  options.duration_s = 0.002;
  const std::vector<AttentionCall> calls = CallsOf(options, 1);
  std::string log;
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(std::make_unique<FakeWay>("a", 100, &log));
  const Result<std::vector<WayResult>> results = Bench(options, 2, calls, ways);
  ASSERT_TRUE(results.ok());
  EXPECT_EQ(results->front().latency.count(), 2);
}

TEST(LocalBench, RatiosCompareTheSameRounds) {
  WayResult here, served;
  here.round_mean_ms = {1, 2, 4, 1};
  served.round_mean_ms = {3, 4, 20, 4};
  const TimesAsLong beside = BesideHere(served, here);
  EXPECT_EQ(beside.lowest, 2);
  EXPECT_EQ(beside.median, 3.5);
  EXPECT_EQ(beside.highest, 5);
  EXPECT_EQ(BesideHere(WayResult(), here).median, 0);
}

// The client's part is inside the time of a call: the clock ticks before the encoding, after it,
// and when the answer arrives.
TEST(LocalBench, AServedCallsTimeIncludesItsEncoding) {
  FakeServer server;
  LoadOptions options = OptionsFor("B1,H1,L4,D8");
  options.client.server = server.address();
  options.count = 3;
  const std::vector<AttentionCall> calls = CallsOf(options, 2);
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(*MakeServed(options, Served::kMessages, calls));
  const Result<std::vector<WayResult>> results = Bench(options, 1, calls, ways);
  ASSERT_TRUE(results.ok()) << results.status().ToString();
  EXPECT_EQ(results->front().latency.min(), 2'000'000);
  EXPECT_EQ(results->front().client_mean_ms, 1);
  EXPECT_EQ(results->front().verified.passed, 2);
}

TEST(LocalBench, ReportsNameEveryWay) {
  FakeServer server;
  BenchFile file;
  file.options = OptionsFor("B1,H1,L4,D8");
  file.options.client.server = server.address();
  file.options.count = 20;
  file.rounds = 4;
  file.device = "cpu";
  file.against = server.address();
  const std::vector<AttentionCall> calls = CallsOf(file.options, 2);
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(*MakeHere(ATTEND_CPU, calls));
  ways.push_back(*MakeServed(file.options, Served::kMessages, calls));
  const Result<std::vector<WayResult>> results = Bench(file.options, file.rounds, calls, ways);
  ASSERT_TRUE(results.ok()) << results.status().ToString();
  file.shapes = {{file.options.mix.front(), 1000, *results}};
  file.shapes[0].ways[0].kernel = "cpu_flash_split";
  file.shapes[0].ways[1].kernel = "cpu_flash";  // part of the other's name
  EXPECT_THAT(BenchTable(file), HasSubstr("served, inline takes "));
  EXPECT_THAT(BenchTable(file), HasSubstr(" in 4 rounds)"));
  const auto json = nlohmann::json::parse(BenchJson(file));
  EXPECT_EQ(json["schema"], "attend-bench-local/1");
  EXPECT_EQ(json["shapes"][0]["ways"][0]["latency_ms"]["count"], 20);
  EXPECT_EQ(json["shapes"][0]["ways"][1]["way"], "served, inline");
  EXPECT_EQ(json["shapes"][0]["ways"][1]["round_mean_ms"].size(), 4u);
  const std::string svg = SvgOf(Draw(BenchFigure(file)));
  for (const char* words : {"here, cpu", "served, inline", "B1,H1,L4,D8", "mean time of a call",
                            "cpu_flash_split, cpu_flash<", ">client<", "in 4 rounds"}) {
    EXPECT_THAT(svg, HasSubstr(words));
  }
}

TEST(LocalBench, ARefusalIsReportedAsTheResult) {
  FakeServer server;
  server.SetBefore([](int64_t, grpc::ServerContext*) {
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "queue is full");
  });
  LoadOptions options = OptionsFor("B1,H1,L4,D8");
  options.client.server = server.address();
  options.count = 2;
  const std::vector<AttentionCall> calls = CallsOf(options, 1);
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(*MakeServed(options, Served::kMessages, calls));
  const Status status = Bench(options, 1, calls, ways).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("queue is full"));
}

}  // namespace
}  // namespace attend::client
