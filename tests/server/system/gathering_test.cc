// SPDX-License-Identifier: Apache-2.0
//
// Requests whose tensors a device reads where their messages arrived: which are gathered and which
// are copied, with the same answers, and all memory is returned.

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

class GatheringTest : public ::testing::Test {
 protected:
  void Start(const std::function<void(Config&)>& change = {}) {
    server_.emplace(change, 1, TestServer::Devices::kGathering);
    stub_ = server_->Stub();
    // A connection's first large message tells the transport to read into blocks.
    (void)IsGathered(test::PlainWireProblem(99, 256, 256));
    first_items_ = server_->backend().gathered_items();
  }
  // Checks the answer. Returns whether the tensors were read where they arrived.
  bool IsGathered(WireProblem problem) {
    const int64_t before = server_->backend().gathered_items();
    grpc::ClientContext context;
    v1::AttendResponse response;
    const grpc::Status status = stub_->Attend(&context, problem.request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problem, response), "");
    return server_->backend().gathered_items() > before;
  }
  // Within a moment: the transport releases an answer once it has been sent.
  void ExpectNothingHeld() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    Engine& engine = server_->server().engine();
    while ((engine.inflight() > 0 || engine.host_pool().used_bytes() > 0) &&
           std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_EQ(engine.inflight(), 0);
    EXPECT_EQ(engine.host_pool().used_bytes(), 0);
  }

  std::optional<TestServer> server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  int64_t first_items_ = 0;  // gathered by Start
};

// 2 heads x 80 rows x 64 fp32, three tensors: 120 KiB.
WireProblem Medium(uint64_t seed) { return test::PlainWireProblem(seed, 80, 64); }
// Above the size that a loop copies: 1.5 MiB.
WireProblem Large(uint64_t seed) { return test::PlainWireProblem(seed, 256, 256); }

TEST_F(GatheringTest, LargeTensorsAreReadWhereTheyArrived) {
  Start([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const double before = server_->Metric("attend_read_in_place_bytes_total");
  EXPECT_TRUE(IsGathered(Medium(1)));
  EXPECT_TRUE(IsGathered(Large(2)));
  // The edges of blocks are copied.
  const double bytes = server_->Metric("attend_read_in_place_bytes_total") - before;
  const double all = 3 * 2 * 4 * (80 * 64 + 256 * 256);
  EXPECT_LE(bytes, all);
  EXPECT_GE(bytes, 0.95 * all);
  ExpectNothingHeld();
}

TEST_F(GatheringTest, AnyFeaturesInAnyLayoutAreAnsweredRight) {
  Start();
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  int gathered = 0;
  for (int i = 0; i < 60; ++i) gathered += IsGathered(test::RandomWireProblem(seed + i, 4e5));
  EXPECT_GT(gathered, 5);
  ExpectNothingHeld();
}

TEST_F(GatheringTest, SmallAndCheckedRequestsAreCopied) {
  Start();
  EXPECT_FALSE(IsGathered(test::PlainWireProblem(3)));
  for (const auto& make : {Medium, Large}) {
    WireProblem checked = make(4);
    checked.request.set_check(true);
    EXPECT_FALSE(IsGathered(std::move(checked)));
  }
}

TEST_F(GatheringTest, RequestsInPartsAreCopied) {
  Start();
  server_->backend().CutItems([](const Problem& problem) { return problem.len_q == 256; }, 2);
  EXPECT_FALSE(IsGathered(Large(6)));
  EXPECT_TRUE(IsGathered(Medium(7)));
}

TEST_F(GatheringTest, MessagesOutsideBlocksAreCopied) {
  Start([](Config& config) { config.receive_memory_bytes = 0; });
  EXPECT_FALSE(IsGathered(Medium(50)));
  EXPECT_FALSE(IsGathered(Large(51)));
}

// Waiting requests must not keep all of the memory where the next messages arrive.
TEST_F(GatheringTest, GatheringBeyondItsBoundIsCopied) {
  Start([](Config& config) {
    config.lanes = 1;
    config.message_memory_max_bytes = 8 << 20;  // an eighth may be kept
  });
  server_->backend().Hold();
  constexpr int kCalls = 14;
  const WireProblem problem = Medium(30);
  const int64_t kept_max = (1 << 20) / static_cast<int64_t>(problem.request.ByteSizeLong());
  std::vector<v1::AttendResponse> responses(kCalls);
  std::vector<std::thread> calls;
  const auto start = [&](int call) {
    calls.emplace_back([&, call] {
      grpc::ClientContext context;
      const grpc::Status status = stub_->Attend(&context, problem.request, &responses[call]);
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  };
  start(0);
  server_->backend().WaitForWaiting(1);  // alone: two calls of one read could form its batch
  for (int call = 1; call < kCalls; ++call) start(call);
  server_->WaitForQueued(kCalls - 1);
  server_->backend().Release();
  for (std::thread& call : calls) call.join();
  for (const v1::AttendResponse& response : responses) {
    WireProblem judged = Medium(30);
    EXPECT_EQ(test::Judge(judged, response), "");
  }
  EXPECT_EQ(server_->backend().gathered_items() - first_items_, kept_max);
  ExpectNothingHeld();
  EXPECT_TRUE(IsGathered(Medium(31))) << "their share is free again";
}

TEST_F(GatheringTest, StreamsGatherToo) {
  Start();
  grpc::ClientContext context;
  const auto stream = stub_->AttendStream(&context);
  std::vector<WireProblem> problems;
  for (int i = 0; i < 8; ++i) {
    problems.push_back(Medium(20 + i));
    ASSERT_TRUE(stream->Write(problems.back().request));
  }
  stream->WritesDone();
  v1::AttendResponse response;
  int answers = 0;
  for (; stream->Read(&response); ++answers) {
    for (WireProblem& problem : problems) {
      if (problem.request.request_id() != response.request_id()) continue;
      EXPECT_EQ(test::Judge(problem, response), "");
    }
  }
  EXPECT_EQ(answers, 8);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(server_->backend().gathered_items() - first_items_, 8);
  ExpectNothingHeld();
}

TEST_F(GatheringTest, FailuresAndCancellationsFreeAllMemory) {
  Start([](Config& config) { config.lanes = 1; });
  server_->backend().FailItem(1, Internal("planted fault"));
  const WireProblem problem = Medium(40);
  grpc::ClientContext failed;
  v1::AttendResponse response;
  EXPECT_EQ(stub_->Attend(&failed, problem.request, &response).error_code(), StatusCode::INTERNAL);
  ExpectNothingHeld();

  server_->backend().Hold();
  grpc::ClientContext running, queued;
  v1::AttendResponse response2;
  std::thread first([&] { (void)stub_->Attend(&running, problem.request, &response); });
  server_->backend().WaitForWaiting(1);
  std::thread second([&] {
    EXPECT_EQ(stub_->Attend(&queued, problem.request, &response2).error_code(),
              StatusCode::CANCELLED);
  });
  server_->WaitForQueued(1);
  queued.TryCancel();
  second.join();
  running.TryCancel();
  server_->backend().Release();
  first.join();
  ExpectNothingHeld();
}

TEST_F(GatheringTest, DeadlinesAndALostDeviceFreeAllMemory) {
  Start([](Config& config) { config.lanes = 1; });
  server_->backend().Hold();
  const WireProblem problem = Medium(80);
  v1::AttendResponse response, late_response, lost_response;
  grpc::ClientContext running, late, lost;
  std::thread first([&] { (void)stub_->Attend(&running, problem.request, &response); });
  server_->backend().WaitForWaiting(1);
  late.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  const grpc::Status too_late = stub_->Attend(&late, problem.request, &late_response);
  // On slow machines it ends as soon as it would be late even alone, which names the deadline.
  EXPECT_TRUE(too_late.error_code() == StatusCode::DEADLINE_EXCEEDED ||
              (too_late.error_code() == StatusCode::RESOURCE_EXHAUSTED &&
               too_late.error_message().starts_with("deadline: ")))
      << too_late.error_code() << " " << too_late.error_message();
  server_->WaitForQueued(0);
  std::thread second([&] {
    EXPECT_EQ(stub_->Attend(&lost, problem.request, &lost_response).error_code(),
              StatusCode::UNAVAILABLE);
  });
  server_->WaitForQueued(1);
  server_->backend().LoseDevice();
  server_->backend().Release();
  first.join();
  second.join();
  ExpectNothingHeld();
}

}  // namespace
}  // namespace attend
