// SPDX-License-Identifier: Apache-2.0
//
// The load runner against a server in this process: counts, verification and reports.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "client/load/load_runner.h"
#include "client/load/load_search.h"
#include "tests/client/support/fake_server.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

LoadOptions Options(const FakeServer& server) {
  LoadOptions options;
  options.client.server = server.address();
  options.client.connections = 2;
  options.client.retry.attempts_max = 1;
  options.mix = {*ParseCallSpec("B1,H1,L4,D8,weight=2"), *ParseCallSpec("B1,H2,L20,D8,causal,lse")};
  options.warmup_s = 0;
  options.count = 60;
  options.quiet = true;
  return options;
}

LoadResult RunLoad(const LoadOptions& options, const LoadStep& step) {
  const Result<Workload> workload = Workload::Make(options);
  EXPECT_TRUE(workload.ok()) << workload.status().ToString();
  VerifyQueue verify(options.verify_bytes_max);
  const std::atomic<bool> interrupted{false};
  LoadRunner runner(options, *workload, &verify, &interrupted);
  Result<LoadResult> result = runner.Run(step);
  EXPECT_TRUE(result.ok()) << result.status().ToString();
  return std::move(*result);
}

TEST(Load, ClosedLoopCountsEveryRequestOnce) {
  for (const bool stream : {false, true}) {
    FakeServer server;
    LoadOptions options = Options(server);
    options.stream = stream;
    options.verify_share = 1;
    options.check_share = 1;
    const LoadResult result = RunLoad(options, {7, 0});
    EXPECT_EQ(result.stats.sent, 60);
    EXPECT_EQ(result.stats.by_code.at(Code::kOk), 60);
    EXPECT_EQ(result.stats.window_ok, 60);
    EXPECT_EQ(server.calls(), 60);
    EXPECT_EQ(server.peers().size(), 2u);
    EXPECT_EQ(result.verified.passed, 60);
    EXPECT_EQ(result.verified.failed, 0);
    EXPECT_EQ(result.stats.checks_passed, 60);
    EXPECT_EQ(result.stats.from_sent.count(), 60);
    EXPECT_EQ(result.stats.phases[kTotal].max(), 2000);
    EXPECT_GT(result.stats.window_flops, 0);
    EXPECT_GT(result.stats.window_bytes_in, 0);
    EXPECT_GT(result.stats.window_bytes_out, 0);
    EXPECT_EQ(result.unanswered, 0);
    EXPECT_FALSE(result.failed());
  }
}

TEST(Load, OpenLoopLatencyCountsFromTheIntendedSend) {
  FakeServer server;
  // One request blocks the only slot; the requests that should have been sent meanwhile must show
  // the delay.
  server.SetBefore([](int64_t number, grpc::ServerContext*) {
    if (number == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return grpc::Status::OK;
  });
  LoadOptions options = Options(server);
  options.arrivals = Arrivals::kConstant;
  options.outstanding_max = 1;
  options.count = 40;
  const LoadResult result = RunLoad(options, {0, 1000});
  EXPECT_EQ(result.stats.sent, 40);
  EXPECT_GT(result.stats.held_back, 0);
  // At 1000 per second the 2nd to 40th were due within 40 ms, so each waited at least 160 ms.
  EXPECT_GE(result.stats.from_intended.ValueAt(0.05), 150'000'000);
  EXPECT_LT(result.stats.from_sent.ValueAt(0.5), result.stats.from_intended.ValueAt(0.05));
}

TEST(Load, RequestsDueButNeverSentAreCounted) {
  FakeServer server;
  server.SetBefore([&](int64_t number, grpc::ServerContext* context) {
    return number < 10 ? grpc::Status::OK : server.UntilCancelled(context);
  });
  LoadOptions options = Options(server);
  options.arrivals = Arrivals::kConstant;
  options.count = 0;
  options.duration_s = 0.5;
  options.outstanding_max = 2;
  options.grace_s = 0;
  const LoadResult result = RunLoad(options, {0, 20000});
  EXPECT_NEAR(static_cast<double>(result.due), 10000, 1);
  EXPECT_EQ(result.stats.sent, 10);
  EXPECT_EQ(result.unanswered, 2);
  EXPECT_EQ(result.due_unsent, result.due - 12);
  EXPECT_TRUE(result.failed());
  EXPECT_FALSE(MeetsP99(result, 1e6));
  const std::string unsent = std::to_string(result.due_unsent);
  EXPECT_THAT(LoadTable(options, {result}),
              AllOf(HasSubstr("open 20000/s"), HasSubstr("DUE, NEVER SENT " + unsent),
                    HasSubstr("latencies are those of 10 of the ")));
  const auto step = nlohmann::json::parse(LoadJson(options, {result}))["steps"][0];
  EXPECT_EQ(step["due"], result.due);
  EXPECT_EQ(step["due_never_sent"], result.due_unsent);
  EXPECT_NEAR(step["latency_share"].get<double>(), 10.0 / 10000, 1e-6);
}

TEST(Load, AnOpenLoopThatKeepsUpSendsEveryRequest) {
  FakeServer server;
  LoadOptions options = Options(server);
  options.count = 0;
  options.duration_s = 0.3;
  const LoadResult result = RunLoad(options, {0, 200});
  EXPECT_EQ(result.due_unsent, 0);
  EXPECT_EQ(result.due, result.stats.sent);
  EXPECT_EQ(result.latency_share(), 1);
  EXPECT_FALSE(result.failed());
}

TEST(Load, DurationBoundsTheMeasurement) {
  FakeServer server;
  LoadOptions options = Options(server);
  options.count = 0;
  options.warmup_s = 0.1;
  options.duration_s = 0.3;
  const LoadResult result = RunLoad(options, {2, 0});
  EXPECT_DOUBLE_EQ(result.elapsed_s, 0.3);
  EXPECT_GT(result.stats.sent, 0);
  EXPECT_LT(result.stats.sent, server.calls()) << "the warm-up is not measured";
}

TEST(Load, WrongAnswersFailTheRun) {
  FakeServer server;
  server.SetAfter([](v1::AttendResponse* response) {
    const float nan = NAN;
    std::memcpy(response->mutable_raw(0)->data(), &nan, 4);
  });
  LoadOptions options = Options(server);
  options.verify_share = 1;
  const LoadResult result = RunLoad(options, {2, 0});
  EXPECT_EQ(result.verified.failed, 60);
  EXPECT_TRUE(result.failed());
  EXPECT_THAT(result.verified.first_failure, HasSubstr("request "));
  EXPECT_THAT(LoadTable(options, {result}), HasSubstr("FAILED 60"));
}

TEST(Load, UnexpectedStatusesFailTheRunAndAllowedOnesDoNot) {
  FakeServer server;
  server.SetBefore([](int64_t number, grpc::ServerContext*) {
    return number % 10 == 3 ? grpc::Status(grpc::RESOURCE_EXHAUSTED, "queue is full")
                            : grpc::Status::OK;
  });
  LoadOptions options = Options(server);
  const LoadResult result = RunLoad(options, {2, 0});
  EXPECT_EQ(result.stats.by_code.at(Code::kResourceExhausted), 6);
  EXPECT_EQ(result.stats.unexpected, 6);
  EXPECT_TRUE(result.failed());
  EXPECT_THAT(LoadTable(options, {result}), HasSubstr("queue is full"));
  options.allowed.insert(Code::kResourceExhausted);
  EXPECT_FALSE(RunLoad(options, {2, 0}).failed());
}

TEST(Load, RequestedDeadlinesAndCancellationsAreNotFailures) {
  FakeServer server;
  server.SetBefore([&](int64_t number, grpc::ServerContext* context) {
    return number % 2 ? server.UntilCancelled(context) : grpc::Status::OK;
  });
  LoadOptions options = Options(server);
  options.cancel_share = 0.5;
  options.cancel_after_ms = 5;
  options.deadline_ms = 50;
  const LoadResult result = RunLoad(options, {4, 0});
  EXPECT_EQ(result.stats.sent, 60);
  EXPECT_GT(result.stats.by_code.count(Code::kCancelled), 0u);
  EXPECT_GT(result.stats.by_code.count(Code::kDeadlineExceeded), 0u);
  EXPECT_FALSE(result.failed());
}

TEST(Load, UnansweredRequestsAreReported) {
  FakeServer server;
  server.SetBefore([&](int64_t number, grpc::ServerContext* context) {
    return number == 5 ? server.UntilCancelled(context) : grpc::Status::OK;
  });
  LoadOptions options = Options(server);
  options.grace_s = 0.2;
  const LoadResult result = RunLoad(options, {3, 0});
  EXPECT_EQ(result.unanswered, 1);
  EXPECT_EQ(result.stats.by_code.at(Code::kOk), 59);
  EXPECT_EQ(result.stats.unexpected, 0);
  EXPECT_TRUE(result.failed());
}

TEST(Load, AnInterruptKeepsTheMeasurementsSoFar) {
  FakeServer server;
  LoadOptions options = Options(server);
  options.count = 0;
  options.duration_s = 1000;
  const Result<Workload> workload = Workload::Make(options);
  VerifyQueue verify(options.verify_bytes_max);
  std::atomic<bool> interrupted{false};
  LoadRunner runner(options, *workload, &verify, &interrupted);
  std::thread presser([&] {
    while (server.calls() < 50) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    interrupted = true;
  });
  const Result<LoadResult> result = runner.Run({2, 0});
  presser.join();
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->interrupted);
  EXPECT_GT(result->stats.window_ok, 0);
  EXPECT_LT(result->elapsed_s, 1000);
  EXPECT_FALSE(result->failed());
  EXPECT_THAT(LoadTable(options, {*result}), HasSubstr("interrupted"));
}

TEST(Load, TheReportIsValidJson) {
  FakeServer server;
  const LoadOptions options = Options(server);
  const std::vector<LoadResult> results = {RunLoad(options, {2, 0}), RunLoad(options, {0, 2000})};
  const auto json = nlohmann::json::parse(LoadJson(options, results));
  ASSERT_EQ(json["steps"].size(), 2u);
  EXPECT_EQ(json["steps"][0]["mode"], "closed");
  EXPECT_EQ(json["steps"][1]["mode"], "open");
  EXPECT_EQ(json["steps"][0]["status"]["OK"], 60);
  EXPECT_GT(json["steps"][1]["latency_from_intended_ms"]["p99"], 0);
  EXPECT_EQ(json["steps"][0]["server_phase_ms"]["total"]["max"], 0.002);
  EXPECT_EQ(json["steps"][0]["network_ms"]["count"], 60);
  const auto& counts = json["steps"][0]["latency_histogram_ms"]["count"];
  EXPECT_EQ(
      std::accumulate(counts.begin(), counts.end(), 0,
                      [](int sum, const nlohmann::json& count) { return sum + count.get<int>(); }),
      60);
  EXPECT_EQ(json["steps"][0]["windows"].size(), 1u) << "a number of requests is one window";
}

TEST(Load, MeasuresUntilTheWindowsAgree) {
  FakeServer server;
  LoadOptions options = Options(server);
  options.count = 0;
  options.duration_s = 0.2;
  options.stability = StabilityRule{.percent = 1e6};  // any three that have answers
  const LoadResult result = RunLoad(options, {2, 0});
  EXPECT_TRUE(result.stable);
  EXPECT_GE(result.windows.size(), 3u);
  EXPECT_DOUBLE_EQ(result.elapsed_s, 0.6);
  EXPECT_EQ(result.first_reported + 3, static_cast<int64_t>(result.windows.size()));
  EXPECT_THAT(LoadTable(options, {result}), HasSubstr("  stable after "));
  const auto json = nlohmann::json::parse(LoadJson(options, {result}));
  EXPECT_EQ(json["steps"][0]["stability"]["stable"], true);
  EXPECT_EQ(json["options"]["max_trials"], 10);
}

TEST(Load, AnUnstableMeasurementIsReported) {
  FakeServer server;
  LoadOptions options = Options(server);
  options.count = 0;
  options.duration_s = 0.02;
  options.stability = StabilityRule{.percent = -1, .windows_max = 4};  // nothing meets it
  const LoadResult result = RunLoad(options, {4, 0});
  EXPECT_FALSE(result.stable);
  EXPECT_EQ(result.windows.size(), 4u);
  EXPECT_FALSE(result.failed());
  EXPECT_THAT(LoadTable(options, {result}),
              HasSubstr("NOT STABLE after 4 windows, asked for -1 %"));
  const auto json = nlohmann::json::parse(LoadJson(options, {result}));
  EXPECT_EQ(json["steps"][0]["stability"]["stable"], false);
}

TEST(Load, WithoutAnswersThereIsNoLatency) {
  FakeServer server;
  const LoadOptions options = Options(server);
  LoadResult result;
  result.step = {0, 5000};
  result.unanswered = 4096;
  const std::string table = LoadTable(options, {result});
  EXPECT_THAT(table, HasSubstr("-          -          -          -          -  from the actual"));
  const auto json = nlohmann::json::parse(LoadJson(options, {result}));
  const auto& latency = json["steps"][0]["latency_from_sent_ms"];
  EXPECT_EQ(latency["count"], 0);
  EXPECT_FALSE(latency.contains("p50"));
}

TEST(VerifyQueue, AnswersBeyondItsMemoryAreSkippedAndCounted) {
  constexpr int64_t kKiB = 1024;
  const AttentionCall small = *MakeRandomCall(*ParseCallSpec("B1,H1,L1,D64"), 1);
  const AttentionCall large = *MakeRandomCall(*ParseCallSpec("B1,H1,L64,D64"), 2);
  AttentionResult right, unread;
  right.o = *HostTensor::Make("o", DType::kFloat32, {1, 1, 1, 64});
  std::memcpy(right.o.data.get(), small.v.data, 256);  // a row that sees one key is that of V
  unread.o = *HostTensor::Make("o", DType::kFloat32, {1, 1, 64, 64});
  // The queue's thread sleeps beside the first answer, which is less than half of what it may have.
  VerifyQueue queue(8 * kKiB);
  queue.Add(small, right, 1);
  queue.Add(large, unread, 1);
  const VerifyQueue::Counts counts = queue.Drain();
  EXPECT_EQ(counts.passed, 1) << counts.first_failure;
  EXPECT_EQ(counts.skipped, 1);
  EXPECT_EQ(counts.failed, 0);
}

// How many there is memory for depends on how fast they are verified.
TEST(Load, EveryAnswerIsVerifiedOrCountedAsSkipped) {
  FakeServer server;
  LoadOptions options = Options(server);
  options.mix = {*ParseCallSpec("B1,H1,L64,D64")};  // 16 KiB per answer
  options.verify_share = 1;
  options.verify_bytes_max = 1;  // room for one at a time
  const LoadResult result = RunLoad(options, {4, 0});
  EXPECT_EQ(result.verified.passed + result.verified.skipped, 60);
  EXPECT_GE(result.verified.passed, 1);
  EXPECT_EQ(result.verified.failed, 0);
}

}  // namespace
}  // namespace attend::client
