// SPDX-License-Identifier: Apache-2.0
//
// AttendStream on whole servers: pipelining, order, independent failures, backpressure, ends.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <map>
#include <thread>

#include "server/engine/engine.h"
#include "tests/server/support/await.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;
using Stream = grpc::ClientReaderWriter<v1::AttendRequest, v1::AttendResponse>;

struct OpenStream {
  explicit OpenStream(TestServer& server) : stub(server.Stub()) {
    // Reads and writes end with it, and the stream with DEADLINE_EXCEEDED.
    context.set_deadline(std::chrono::system_clock::now() + test::kWaitMost);
    stream = stub->AttendStream(&context);
  }
  grpc::ClientContext context;
  std::unique_ptr<v1::AttentionService::Stub> stub;
  std::unique_ptr<Stream> stream;
};

void AwaitIdle(TestServer& server) {
  Engine& engine = server.server().engine();
  test::Await("nothing is in flight", [&] { return engine.inflight() == 0; });
  test::Await("no memory is in use", [&] { return engine.host_pool().used_bytes() == 0; });
}

TEST(StreamTest, PipelinesAndAnswersAll) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TestServer server;
  OpenStream open(server);
  constexpr int kRequests = 200;
  std::map<std::string, WireProblem> problems;
  std::vector<v1::AttendRequest> requests;
  for (int i = 0; i < kRequests; ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i, 2e4);
    requests.push_back(problem.request);
    problems.emplace(problem.request.request_id(), std::move(problem));
  }
  std::thread writer([&] {
    for (const v1::AttendRequest& request : requests) EXPECT_TRUE(open.stream->Write(request));
    open.stream->WritesDone();
  });
  v1::AttendResponse response;
  int answers = 0;
  while (open.stream->Read(&response)) {
    ++answers;
    const auto found = problems.find(response.request_id());
    EXPECT_FALSE(response.has_status()) << response.status().message();
    if (found == problems.end()) {
      ADD_FAILURE() << "unrequested answer " << response.request_id();
      continue;
    }
    EXPECT_EQ(test::Judge(found->second, response), "");
    problems.erase(found);
  }
  writer.join();
  EXPECT_EQ(answers, kRequests);
  EXPECT_TRUE(open.stream->Finish().ok());
}

TEST(StreamTest, AnswersAreSentInOrderOfCompletion) {
  TestServer server([](Config& config) {
    config.lanes = 1;
    config.max_batch_requests = 1;
  });
  server.backend().Hold();
  OpenStream open(server);
  std::vector<WireProblem> problems;
  for (int i = 0; i < 3; ++i) problems.push_back(test::PlainWireProblem(i));
  problems[1].request.set_priority(-1);
  problems[2].request.set_priority(1);  // overtakes the second; the first is already running
  for (const WireProblem& problem : problems) {
    ASSERT_TRUE(open.stream->Write(problem.request));
    if (&problem == &problems.front()) server.backend().WaitForWaiting(1);
  }
  server.WaitForQueued(2);
  server.backend().Release();
  for (const int i : {0, 2, 1}) {
    v1::AttendResponse response;
    ASSERT_TRUE(open.stream->Read(&response));
    EXPECT_EQ(response.request_id(), problems[i].request.request_id());
    EXPECT_EQ(test::Judge(problems[i], response), "");
  }
  open.stream->WritesDone();
  v1::AttendResponse none;
  EXPECT_FALSE(open.stream->Read(&none));
  EXPECT_TRUE(open.stream->Finish().ok());
}

TEST(StreamTest, OneBadRequestFailsAlone) {
  TestServer server;
  OpenStream open(server);
  std::map<std::string, WireProblem> problems;
  for (int i = 0; i < 9; ++i) {
    WireProblem problem = test::PlainWireProblem(i);
    if (i % 3 == 1) problem.request.mutable_q()->set_shape(3, 257);
    ASSERT_TRUE(open.stream->Write(problem.request));
    problems.emplace(problem.request.request_id(), std::move(problem));
  }
  open.stream->WritesDone();
  v1::AttendResponse response;
  int bad = 0;
  while (open.stream->Read(&response)) {
    WireProblem& problem = problems.at(response.request_id());
    if (problem.request.q().shape(3) == 257) {
      ++bad;
      EXPECT_EQ(response.status().code(), static_cast<int>(Code::kInvalidArgument));
      EXPECT_NE(response.status().message().find("k.shape[3]"), std::string::npos);
      EXPECT_EQ(response.status().retry_after_ms(), 0);
      EXPECT_FALSE(response.has_o());
      EXPECT_EQ(response.raw_size(), 0);
    } else {
      EXPECT_EQ(test::Judge(problem, response), "");
    }
    problems.erase(response.request_id());
  }
  EXPECT_EQ(bad, 3);
  EXPECT_TRUE(problems.empty());
  EXPECT_TRUE(open.stream->Finish().ok());
}

TEST(StreamTest, AFullQueueIsReportedWithARetryHint) {
  TestServer server([](Config& config) {
    config.lanes = 1;
    config.max_queue = 1;
  });
  server.backend().Hold();
  OpenStream open(server);
  ASSERT_TRUE(open.stream->Write(test::PlainWireProblem(0).request));
  server.backend().WaitForWaiting(1);
  ASSERT_TRUE(open.stream->Write(test::PlainWireProblem(1).request));
  server.WaitForQueued(1);
  ASSERT_TRUE(open.stream->Write(test::PlainWireProblem(2).request));
  v1::AttendResponse response;
  ASSERT_TRUE(open.stream->Read(&response));
  EXPECT_EQ(response.request_id(), "plain-2");
  EXPECT_EQ(response.status().code(), static_cast<int>(Code::kResourceExhausted));
  EXPECT_GT(response.status().retry_after_ms(), 0);
  server.backend().Release();
  open.stream->WritesDone();
  int good = 0;
  while (open.stream->Read(&response)) good += response.has_status() ? 0 : 1;
  EXPECT_EQ(good, 2);
}

TEST(StreamTest, TheServerStopsReadingAClientThatDoesNotRead) {
  constexpr int kUnanswered = 4;
  TestServer server([](Config& config) { config.stream_requests_max = kUnanswered; });
  OpenStream open(server);
  const WireProblem problem = test::PlainWireProblem(0, 256, 128);  // 0.75 MiB in, 0.25 MiB out
  // Writes continue until flow control stops them; no answer is read meanwhile.
  std::atomic<int> written{0};
  std::atomic<bool> closing{false};
  std::thread writer([&] {
    while (!closing && open.stream->Write(problem.request)) ++written;
    open.stream->WritesDone();
  });
  // Time passes without progress: the amount in flight has reached its bound.
  int before = -1;
  test::Await("writes stop", [&] {
    if (before == written) return true;
    before = written;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return false;
  });
  const int64_t held = server.server().engine().host_pool().used_bytes();
  const int64_t request_bytes = 4 * 256 * 128 * 2 * 4;
  EXPECT_LE(held, kUnanswered * request_bytes * 5 / 4);
  EXPECT_LE(server.server().engine().inflight(), kUnanswered);
  closing = true;
  v1::AttendResponse response;
  int answers = 0;
  while (open.stream->Read(&response)) ++answers;
  writer.join();
  EXPECT_EQ(answers, written);
  EXPECT_TRUE(open.stream->Finish().ok());
}

TEST(StreamTest, AFailedRequestsMemoryIsFreedBeforeTheClientIsTold) {
  TestServer server;
  OpenStream open(server);
  for (int i = 0; i < 20; ++i) {
    server.backend().FailItem(1, Internal("planted fault"));
    ASSERT_TRUE(open.stream->Write(test::PlainWireProblem(i, 64, 64).request));
    v1::AttendResponse response;
    ASSERT_TRUE(open.stream->Read(&response));
    EXPECT_EQ(response.status().code(), static_cast<int>(Code::kInternal));
    EXPECT_EQ(response.status().message(), "planted fault");
    EXPECT_EQ(response.request_id(), "plain-" + std::to_string(i));
    EXPECT_EQ(server.server().engine().host_pool().used_bytes(), 0);
  }
}

TEST(StreamTest, ACancelledStreamDropsItsQueuedRequests) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  {
    OpenStream open(server);
    ASSERT_TRUE(open.stream->Write(test::PlainWireProblem(0).request));
    server.backend().WaitForWaiting(1);
    for (int i = 1; i < 5; ++i) ASSERT_TRUE(open.stream->Write(test::PlainWireProblem(i).request));
    server.WaitForQueued(4);
    open.context.TryCancel();
    EXPECT_EQ(open.stream->Finish().error_code(), StatusCode::CANCELLED);
    test::Await("one request is in flight",
                [&] { return server.server().engine().inflight() <= 1; });
  }
  server.backend().Release();
  AwaitIdle(server);
  EXPECT_EQ(server.backend().submitted_items(), 1);
}

TEST(StreamTest, DrainEndsStreamsAfterTheirLastAnswer) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  OpenStream idle(server);
  OpenStream busy(server);
  ASSERT_TRUE(idle.stream->Write(test::PlainWireProblem(0).request));
  server.backend().WaitForWaiting(1);
  server.backend().ReleaseOne();
  v1::AttendResponse response;
  ASSERT_TRUE(idle.stream->Read(&response));
  WireProblem problem = test::PlainWireProblem(1);
  ASSERT_TRUE(busy.stream->Write(problem.request));
  server.backend().WaitForWaiting(1);
  std::future<bool> drained = std::async(
      std::launch::async, [&] { return server.server().Drain(std::chrono::seconds(60)); });
  EXPECT_FALSE(idle.stream->Read(&response));
  EXPECT_EQ(idle.stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  server.backend().Release();
  ASSERT_TRUE(busy.stream->Read(&response));
  EXPECT_EQ(test::Judge(problem, response), "");
  EXPECT_FALSE(busy.stream->Read(&response));
  EXPECT_EQ(busy.stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(drained.get());
}

TEST(StreamTest, ManyStreamsLeaveNothingBehind) {
  TestServer server;
  std::vector<std::thread> clients;
  std::atomic<int> answered{0};
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int round = 0; round < 10; ++round) {
        OpenStream open(server);
        for (int i = 0; i < 5; ++i) open.stream->Write(test::PlainWireProblem(i).request);
        v1::AttendResponse response;
        if ((c + round) % 3 == 0) {  // leaves in the middle
          open.stream->Read(&response);
          open.context.TryCancel();
          open.stream->Finish();
          continue;
        }
        open.stream->WritesDone();
        while (open.stream->Read(&response)) ++answered;
        EXPECT_TRUE(open.stream->Finish().ok());
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GE(answered, 4 * 6 * 5);
  AwaitIdle(server);
}

}  // namespace
}  // namespace attend
