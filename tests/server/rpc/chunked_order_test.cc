// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked beside other requests: whose tenant and priority apply, how its phases are named,
// and streams that have not joined when the server drains.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "server/engine/engine.h"
#include "server/schedule/tenants.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::ChunkedHeader;
using test::ChunkedStreamClient;
using test::TestServer;
using test::WireProblem;

constexpr std::chrono::milliseconds kNoTimeout{0};

void SendTensors(ChunkedStreamClient& client, const v1::AttendRequest& request) {
  for (int i = 0; i < 3; ++i) client.SendChunk(i + 1, 0, request.raw(i));
}

void AwaitInflight(TestServer& server, int64_t count) {
  while (server.server().engine().inflight() != count) std::this_thread::yield();
}

void AwaitNothingHeld(TestServer& server) {
  AwaitInflight(server, 0);
  while (server.server().engine().host_pool().used_bytes() > 0) std::this_thread::yield();
}

TEST(ChunkedOrderTest, TheTenantIsTakenFromTheHeadersStream) {
  TestServer server([](Config& config) {
    config.lanes = 1;
    config.metrics_listen = "127.0.0.1:0";
    config.tenants = *Tenants::Parse({"a=2", "b=1"});
  });
  const WireProblem problem = test::PlainWireProblem(1);
  server.backend().Hold();
  ChunkedStreamClient running(server, kNoTimeout, "stranger");
  running.SendHeader(ChunkedHeader(problem.request));
  SendTensors(running, problem.request);
  server.backend().WaitForWaiting(1);

  ChunkedStreamClient first(server, kNoTimeout, "a"), second(server, kNoTimeout, "b");
  ASSERT_TRUE(first.SendHeader(ChunkedHeader(problem.request)));
  ASSERT_TRUE(second.SendToken(first.Receive().grant().token()));
  SendTensors(second, problem.request);
  AwaitInflight(server, 2);
  const std::string queued = "attend_tenant_queue_requests{device=\"cpu\",tenant=";
  EXPECT_EQ(server.Metric(queued + "\"a\"}"), 1);
  EXPECT_EQ(server.Metric(queued + "\"b\"}"), 0);
  ChunkedStreamClient lost(server, kNoTimeout, "b");  // a failed upload counts for its tenant too
  ASSERT_TRUE(lost.SendHeader(ChunkedHeader(problem.request)));
  lost.Receive();
  lost.Cancel();
  lost.Finish();
  server.backend().Release();
  for (ChunkedStreamClient* each : {&running, &first, &second}) EXPECT_TRUE(each->Finish().ok());
  AwaitNothingHeld(server);

  const auto ended = [&](const std::string& code, const std::string& tenant) {
    return server.Metric("attend_tenant_requests_total{code=\"" + code + "\",tenant=\"" + tenant +
                         "\"}");
  };
  EXPECT_EQ(ended("OK", "default"), 1);
  EXPECT_EQ(ended("OK", "a"), 1);
  EXPECT_EQ(ended("OK", "b"), 0);
  EXPECT_EQ(ended("CANCELLED", "b"), 1);
  EXPECT_GT(server.Metric("attend_tenant_flops_total{tenant=\"a\"}"), 0);
  EXPECT_EQ(server.Metric("attend_tenant_flops_total{tenant=\"b\"}"), 0);
}

TEST(ChunkedOrderTest, AnUploadIsASeparatePhase) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const WireProblem problem = test::PlainWireProblem(1);
  const auto phase = [&](const std::string& what, const std::string& name) {
    return server.Metric("attend_phase_duration_seconds_" + what + "{phase=\"" + name + "\"}");
  };
  EXPECT_EQ(phase("count", "upload"), 0);
  ASSERT_TRUE(test::AttendOverStreams(server, problem.request, 2, 500, 1).ok());
  EXPECT_EQ(phase("count", "upload"), 1);
  EXPECT_EQ(phase("count", "receive"), 0);
  EXPECT_EQ(phase("count", "total"), 1);
  EXPECT_GT(phase("sum", "upload"), 0);
  EXPECT_LE(phase("sum", "upload"), phase("sum", "total"));
  v1::AttendResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.Stub()->Attend(&context, problem.request, &response).ok());
  EXPECT_EQ(phase("count", "upload"), 1);
  EXPECT_EQ(phase("count", "receive"), 1);
  ChunkedStreamClient cancelled(server);
  cancelled.SendHeader(ChunkedHeader(problem.request));
  cancelled.Receive();
  cancelled.Cancel();
  cancelled.Finish();
  AwaitNothingHeld(server);
  EXPECT_EQ(phase("count", "upload"), 1) << "of answered requests";
}

// The server may or may not have read the token when it begins to drain: the stream joins, is
// refused, or finds that the request has ended. A complete request is answered in any case.
TEST(ChunkedOrderTest, ADrainDuringAJoinStillAnswersACompleteRequest) {
  for (const bool complete : {true, false, true, false}) {
    TestServer server;
    server.backend().Hold();
    const WireProblem problem = test::PlainWireProblem(3);
    ChunkedStreamClient first(server), second(server);
    ASSERT_TRUE(first.SendHeader(ChunkedHeader(problem.request)));
    const std::string token = first.Receive().grant().token();
    if (complete) {
      SendTensors(first, problem.request);
      server.backend().WaitForWaiting(1);
    }
    std::thread joins([&] { second.SendToken(token); });
    std::future<bool> drained = std::async(
        std::launch::async, [&] { return server.server().Drain(std::chrono::seconds(60)); });
    while (!server.server().engine().draining()) std::this_thread::yield();
    server.backend().Release();
    joins.join();
    const StatusCode one = first.Finish().error_code();
    const StatusCode two = second.Finish().error_code();
    EXPECT_EQ(one, complete ? StatusCode::OK : StatusCode::UNAVAILABLE);
    EXPECT_TRUE(two == StatusCode::UNAVAILABLE || two == StatusCode::NOT_FOUND || two == one)
        << two;
    EXPECT_TRUE(drained.get());
    AwaitNothingHeld(server);
  }
}

}  // namespace
}  // namespace attend
