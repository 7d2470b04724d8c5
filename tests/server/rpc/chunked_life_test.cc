// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked when something fails or is slow: memory, lost streams, cancellation, deadlines,
// idle clients, drain, and seeded random mixtures of all. Nothing may be left behind.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <thread>

#include "server/engine/engine.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using std::chrono::milliseconds;
using test::ChunkedHeader;
using test::ChunkedStreamClient;
using test::TestServer;
using test::WireProblem;

int64_t UsedBytes(TestServer& server) { return server.server().engine().host_pool().used_bytes(); }

void WaitUntilEmpty(TestServer& server) {
  while (server.server().engine().inflight() > 0) std::this_thread::yield();
  while (UsedBytes(server) > 0) std::this_thread::yield();
}

// A request over two streams, admitted and joined.
struct TwoStreams {
  TwoStreams(TestServer& server, const v1::AttendRequest& request)
      : first(std::make_unique<ChunkedStreamClient>(server)),
        second(std::make_unique<ChunkedStreamClient>(server)) {
    EXPECT_TRUE(first->SendHeader(ChunkedHeader(request)));
    EXPECT_TRUE(second->SendToken(first->Receive().grant().token()));
    EXPECT_TRUE(second->Receive().has_grant());
  }
  void SendAll(const v1::AttendRequest& request) {
    for (int i = 0; i < 3; ++i) second->SendChunk(i + 1, 0, request.raw(i));
  }
  std::unique_ptr<ChunkedStreamClient> first, second;
};

TEST(ChunkedLifeTest, AFullQueueRefusesTheCompleteRequest) {
  TestServer server([](Config& config) {
    config.lanes = 1;
    config.max_queue = 1;
  });
  server.backend().Hold();
  const WireProblem problem = test::PlainWireProblem(1);
  std::vector<std::unique_ptr<ChunkedStreamClient>> clients;
  for (int c = 0; c < 3; ++c) {
    clients.push_back(std::make_unique<ChunkedStreamClient>(server));
    clients.back()->SendHeader(ChunkedHeader(problem.request));
    for (int i = 0; i < 3; ++i) clients.back()->SendChunk(i + 1, 0, problem.request.raw(i));
    if (c == 0) server.backend().WaitForWaiting(1);
    server.WaitForQueued(std::min(c, 1));
  }
  EXPECT_EQ(clients[2]->Finish().error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GT(clients[2]->PushbackMs(), 0);
  server.backend().Release();
  EXPECT_TRUE(clients[0]->Finish().ok());
  EXPECT_TRUE(clients[1]->Finish().ok());
  WaitUntilEmpty(server);
}

TEST(ChunkedLifeTest, ALostStreamEndsTheUploadWithOneStatus) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const WireProblem problem = test::PlainWireProblem(2);
  for (const bool lose_first : {false, true}) {
    TwoStreams streams(server, problem.request);
    streams.second->SendChunk(1, 0, problem.request.raw(0));
    auto& lost = lose_first ? streams.first : streams.second;
    auto& left = lose_first ? streams.second : streams.first;
    lost->Cancel();
    lost->Finish();
    lost.reset();  // and its connection
    const grpc::Status status = left->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::CANCELLED);
    EXPECT_NE(status.error_message().find("a stream of the request was cancelled or lost"),
              std::string::npos);
    WaitUntilEmpty(server);
  }
  EXPECT_EQ(server.Metric("attend_requests_total{code=\"CANCELLED\"}"), 2);
}

TEST(ChunkedLifeTest, ALostStreamDropsTheQueuedRequest) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const WireProblem problem = test::PlainWireProblem(3);
  TwoStreams running(server, problem.request), queued(server, problem.request);
  running.SendAll(problem.request);
  server.backend().WaitForWaiting(1);
  queued.SendAll(problem.request);
  server.WaitForQueued(1);
  queued.second->Cancel();
  EXPECT_EQ(queued.first->Finish().error_code(), StatusCode::CANCELLED);
  while (server.server().engine().inflight() > 1) std::this_thread::yield();
  // A running request is not stopped; its answer is dropped.
  running.first->Cancel();
  running.second->Cancel();
  EXPECT_EQ(running.first->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_EQ(running.second->Finish().error_code(), StatusCode::CANCELLED);
  server.backend().Release();
  WaitUntilEmpty(server);
  EXPECT_EQ(server.backend().submitted_items(), 1);
}

TEST(ChunkedLifeTest, ADeviceFailureIsReportedOnEveryStream) {
  TestServer server;
  server.backend().FailItem(1, Internal("cudaErrorPretend (999)"));
  const WireProblem problem = test::PlainWireProblem(4);
  TwoStreams streams(server, problem.request);
  streams.SendAll(problem.request);
  for (auto* stream : {&streams.first, &streams.second}) {
    const grpc::Status status = (*stream)->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INTERNAL);
    EXPECT_NE(status.error_message().find("cudaErrorPretend"), std::string::npos);
  }
  WaitUntilEmpty(server);
}

TEST(ChunkedLifeTest, AnIdleUploadLosesItsMemory) {
  TestServer server([](Config& config) { config.chunked_idle_timeout_seconds = 2; });
  const WireProblem problem = test::PlainWireProblem(5);
  TwoStreams streams(server, problem.request);
  streams.second->SendChunk(1, 0, problem.request.raw(0));
  for (auto* stream : {&streams.first, &streams.second}) {
    const grpc::Status status = (*stream)->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
    EXPECT_NE(status.error_message().find("chunked-idle-timeout"), std::string::npos);
    EXPECT_NE(status.error_message().find("2048 of 3072 bytes are missing"), std::string::npos)
        << status.error_message();
  }
  WaitUntilEmpty(server);
}

TEST(ChunkedLifeTest, ARunningRequestIsNotIdle) {
  const auto clock = std::make_shared<test::ManualClock>();
  TestServer server([](Config& config) { config.chunked_idle_timeout_seconds = 0.1; }, 1,
                    TestServer::Devices::kPlain, clock);
  server.backend().Hold();
  const WireProblem problem = test::PlainWireProblem(6);
  ChunkedStreamClient client(server), idle(server);
  ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
  for (int i = 0; i < 3; ++i) client.SendChunk(i + 1, 0, problem.request.raw(i));
  server.backend().WaitForWaiting(1);
  // Another upload's timeout shows that the time has passed.
  ASSERT_TRUE(idle.SendHeader(ChunkedHeader(problem.request)));
  EXPECT_TRUE(idle.Receive().has_grant());
  clock->Advance(milliseconds(100));
  EXPECT_EQ(idle.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  server.backend().Release();
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ChunkedLifeTest, ADeadlineEndsAnUpload) {
  TestServer server;
  const WireProblem problem = test::PlainWireProblem(7);
  ChunkedStreamClient client(server, milliseconds(1000));
  client.SendHeader(ChunkedHeader(problem.request));
  client.SendChunk(1, 0, problem.request.raw(0));
  EXPECT_EQ(client.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  WaitUntilEmpty(server);
}

TEST(ChunkedLifeTest, AStreamLostDuringTheAnswerEndsTheOthers) {
  // More than two connections buffer while the client does not read.
  const WireProblem large = test::PlainWireProblem(8, 65536, 64);  // 32 MiB per tensor
  TestServer server;
  server.backend().SetCompute([](const Attention& a) {
    std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
  });
  std::mt19937_64 random(1);
  TwoStreams streams(server, large.request);
  for (const test::Chunk& chunk : test::CutToChunks(large.request, 1 << 20, random)) {
    ASSERT_TRUE(streams.first->SendChunk(chunk.tensor, chunk.offset, chunk.data));
  }
  EXPECT_TRUE(streams.first->Receive().has_response());  // and stays: a write is stuck
  streams.second->Receive();
  streams.second->Cancel();
  streams.second->Finish();
  WaitUntilEmpty(server);
  EXPECT_EQ(streams.first->Finish().error_code(), StatusCode::CANCELLED);
}

TEST(ChunkedLifeTest, DrainEndsUploadsAndFinishesCompleteRequests) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const WireProblem problem = test::PlainWireProblem(10);
  TwoStreams running(server, problem.request), uploading(server, problem.request);
  ChunkedStreamClient silent(server);
  running.SendAll(problem.request);
  server.backend().WaitForWaiting(1);
  uploading.second->SendChunk(1, 0, problem.request.raw(0));
  std::future<bool> drained = std::async(
      std::launch::async, [&] { return server.server().Drain(std::chrono::seconds(60)); });
  for (auto* stream : {&uploading.first, &uploading.second}) {
    EXPECT_EQ((*stream)->Finish().error_code(), StatusCode::UNAVAILABLE);
    EXPECT_GT((*stream)->PushbackMs(), 0);
  }
  EXPECT_EQ(silent.Finish().error_code(), StatusCode::UNAVAILABLE);
  ChunkedStreamClient late(server);
  late.SendHeader(ChunkedHeader(problem.request));
  EXPECT_EQ(late.Finish().error_code(), StatusCode::UNAVAILABLE);
  server.backend().Release();
  EXPECT_TRUE(running.first->Finish().ok());
  EXPECT_TRUE(running.second->Finish().ok());
  EXPECT_TRUE(drained.get());
  WaitUntilEmpty(server);
}

TEST(ChunkedLifeTest, StoppingTheServerEndsEveryUpload) {
  const WireProblem problem = test::PlainWireProblem(11);
  auto server = std::make_unique<TestServer>();
  TwoStreams streams(*server, problem.request);
  streams.second->SendChunk(1, 0, problem.request.raw(0));
  server.reset();
  EXPECT_FALSE(streams.first->Finish().ok());
  EXPECT_FALSE(streams.second->Finish().ok());
}

// The read that finds the half-close begins while other threads still copy earlier chunks and the
// grant is on its way. In any order, the bytes of the last chunk must count.
TEST(ChunkedLifeTest, AHalfCloseRightAfterTheLastChunkLosesNoBytes) {
  TestServer server([](Config& config) { config.copy_threads = 2; });
  server.backend().SetCompute([](const Attention&) {});
  const WireProblem large = test::PlainWireProblem(12, 5000, 64);  // 1.2 MiB per tensor
  const WireProblem small = test::PlainWireProblem(12);
  const int rounds = std::max(20, static_cast<int>(100 * test::TestScale()));
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int round = 0; round < rounds; ++round) {
        const v1::AttendRequest& request = (c == 0 ? large : small).request;
        ChunkedStreamClient client(server);
        client.SendHeader(ChunkedHeader(request));
        for (int i = 0; i < 2; ++i) client.SendChunk(i + 1, 0, request.raw(i));
        client.SendChunk(3, 0, request.raw(2).substr(0, 1));
        client.SendChunk(3, 1, request.raw(2).substr(1));
        client.HalfClose();
        const grpc::Status status = client.Finish();
        EXPECT_TRUE(status.ok()) << status.error_message();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  WaitUntilEmpty(server);
}

// One client's request with at most one fault at a random point.
void RandomRequest(TestServer& server, uint64_t seed, std::atomic<int>& good) {
  std::mt19937_64 random(seed);
  WireProblem problem = test::RandomWireProblem(seed, 1e4);
  const std::vector<test::Chunk> chunks = test::CutToChunks(problem.request, 3000, random);
  const int fault = static_cast<int>(random() % 6);
  if (fault == 0) {
    const test::ChunkedOutcome outcome = test::AttendOverStreams(
        server, problem.request, 1 + static_cast<int>(random() % 4), 3000, seed);
    EXPECT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
    if (!outcome.ok()) return;
    EXPECT_EQ(test::Judge(problem, outcome.response), "");
    ++good;
    return;
  }
  std::vector<std::unique_ptr<ChunkedStreamClient>> streams;
  streams.push_back(std::make_unique<ChunkedStreamClient>(server, milliseconds(30000)));
  streams[0]->SendHeader(ChunkedHeader(problem.request));
  v1::AttendChunkedResponse grant;
  if (!streams[0]->Receive(&grant)) return;
  for (uint64_t more = random() % 3; more > 0; --more) {
    streams.push_back(std::make_unique<ChunkedStreamClient>(server, milliseconds(30000)));
    streams.back()->SendToken(grant.grant().token());
  }
  const size_t stop = random() % (chunks.size() + 1);
  for (size_t c = 0; c < chunks.size(); ++c) {
    ChunkedStreamClient& stream = *streams[random() % streams.size()];
    if (c == stop && fault == 1) stream.Cancel();
    if (c == stop && fault == 2) stream.SendChunk(1, UINT64_MAX / 2, "abc");
    if (c == stop && fault == 3) break;            // and half-close
    if (c == stop && fault == 4) streams.clear();  // all cancelled and gone
    if (streams.empty()) return;
    stream.SendChunk(chunks[c].tensor, chunks[c].offset, chunks[c].data);
  }
  if (fault == 5) streams[random() % streams.size()]->Cancel();  // maybe while it is answered
  for (auto& stream : streams) stream->HalfClose();
  for (auto& stream : streams) stream->Finish();
}

TEST(ChunkedLifeTest, RandomSchedulesLeaveNothingBehind) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TestServer server([](Config& config) { config.log_level = "off"; });
  std::atomic<int> good{0};
  std::vector<std::thread> clients;
  const int rounds = std::max(10, static_cast<int>(40 * test::TestScale()));
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < rounds; ++i) {
        RandomRequest(server, seed + static_cast<uint64_t>(1000 * c + i), good);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(good, 0);
  WaitUntilEmpty(server);
}

}  // namespace
}  // namespace attend
