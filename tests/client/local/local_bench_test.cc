// SPDX-License-Identifier: Apache-2.0
//
// Calls computed in this process: right answers, times of a clock that is set by hand, and the
// same shape against a server.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/local/local_bench.h"
#include "tests/client/support/fake_server.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

// Every look at it is a millisecond later.
LocalCall::NowNs StepClock() {
  return [now = int64_t{0}]() mutable { return now += 1'000'000; };
}

TEST(LocalCall, AnswersAreRightForEveryTermAndLayout) {
  for (const char* shape :
       {"B2,H4,Hkv2,L70,D40", "B1,H2,L33,D64,dtype=float16,layout=blhd,causal,lse",
        "B3,H2,Lq1,Lk65,D32,Dv48,ragged,sinks,alibi", "B2,H2,L40,D16,layout=lhd,ragged,window=9:0",
        "B2,H2,L24,D16,bias,softcap=3", "B1,H2,L24,D16,bits,top-left,causal",
        "B1,H2,L64,D16,dropout=0.3", "B1,H1,L20,D16,kernel=cpu_reference"}) {
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

TEST(LocalCall, WhatCannotBeComputedIsRefused) {
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

TEST(LocalBench, MeasuresByTheClockThatItIsGiven) {
  LoadOptions options;
  options.mix = {*ParseCallSpec("B1,H1,L4,D8")};
  options.warmup_s = 0.02;
  options.duration_s = 0.05;
  options.pool = 2;
  const std::atomic<bool> interrupted{false};
  const Result<WayResult> way = BenchHere(options, ATTEND_CPU, interrupted, StepClock());
  ASSERT_TRUE(way.ok()) << way.status().ToString();
  EXPECT_EQ(way->way, "here, cpu");
  EXPECT_EQ(way->kernel, "cpu_flash");
  EXPECT_EQ(way->latency.max(), 3'000'000);
  // A call and the look at the clock before it take 5 ms.
  EXPECT_EQ(way->latency.count(), 10);
  EXPECT_EQ(way->phase_mean_ms[kKernel], 1);
  EXPECT_EQ(way->verified.passed, 2);
  EXPECT_FALSE(way->failed);
}

TEST(LocalBench, ReportsNameEveryWay) {
  FakeServer server;
  BenchFile file;
  file.options.mix = {*ParseCallSpec("B1,H1,L4,D8")};
  file.options.client.server = server.address();
  file.options.warmup_s = 0;
  file.options.count = 20;
  file.options.quiet = true;
  file.options.verify_share = 1;
  file.device = "cpu";
  file.against = server.address();
  const std::atomic<bool> interrupted{false};
  const Result<WayResult> here = BenchHere(file.options, ATTEND_CPU, interrupted, StepClock());
  const Result<WayResult> served = BenchServed(file.options, interrupted);
  ASSERT_TRUE(here.ok() && served.ok()) << served.status().ToString();
  EXPECT_EQ(served->way, "served, inline");
  EXPECT_EQ(served->latency.count(), 20);
  EXPECT_EQ(served->verified.passed, 20);
  file.shapes = {{file.options.mix.front(), 1000, {*here, *served}}};
  EXPECT_THAT(BenchTable(file), HasSubstr("served, inline takes "));
  const auto json = nlohmann::json::parse(BenchJson(file));
  EXPECT_EQ(json["schema"], "attend-bench-local/1");
  EXPECT_EQ(json["shapes"][0]["ways"][0]["latency_ms"]["count"], 20);
  EXPECT_EQ(json["shapes"][0]["ways"][1]["way"], "served, inline");
  const std::string svg = SvgOf(Draw(BenchFigure(file)));
  for (const char* words : {"here, cpu", "served, inline", "B1,H1,L4,D8", "mean time of a call"}) {
    EXPECT_THAT(svg, HasSubstr(words));
  }
}

TEST(LocalBench, ARefusalIsTheResult) {
  FakeServer server;
  server.SetBefore([](int64_t, grpc::ServerContext*) {
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "queue is full");
  });
  LoadOptions options;
  options.mix = {*ParseCallSpec("B1,H1,L4,D8")};
  options.client.server = server.address();
  options.warmup_s = 0;
  options.count = 2;
  options.quiet = true;
  const std::atomic<bool> interrupted{false};
  const Status status = BenchServed(options, interrupted).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("queue is full"));
}

}  // namespace
}  // namespace attend::client
