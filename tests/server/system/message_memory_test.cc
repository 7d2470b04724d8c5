// SPDX-License-Identifier: Apache-2.0
//
// The bound on incomplete messages, outside the memory budget: above it their connections are ended
// and leave nothing behind, and messages within it are served.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "kernels/reference/cpu_reference.h"
#include "server/engine/engine.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

constexpr int64_t kLargeLength = 16384;
// Far more messages than needed, however slow the machine.
constexpr int kLargeMost = 200;
constexpr int kSmallMost = 10'000;

void Compute(const Attention& a) {
  if (a.problem.len_q < kLargeLength) return CpuReference(a);
  std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
}

grpc::Status Attend(const TestServer& server, const v1::AttendRequest& request,
                    v1::AttendResponse* response) {
  grpc::ClientContext context;
  return server.Stub()->Attend(&context, request, response);
}

// Clients are told that they may retry.
bool IsRefusal(const grpc::Status& status) {
  return status.error_code() == StatusCode::RESOURCE_EXHAUSTED ||
         status.error_code() == StatusCode::UNAVAILABLE;
}

TEST(MessageMemoryTest, MessagesAboveTheBoundAreRefusedAndFreed) {
  TestServer server([](Config& config) {
    config.message_memory_max_bytes = 1 << 20;
    config.metrics_listen = "127.0.0.1:0";
  });
  server.backend().SetCompute(Compute);
  const WireProblem large = test::PlainWireProblem(1, kLargeLength, 64);  // 24 MiB
  WireProblem small = test::PlainWireProblem(2);
  int refused = 0;
  for (int sent = 0; refused < 4; ++sent) {
    // The server checks periodically, so a message may slip through.
    ASSERT_LT(sent, kLargeMost) << refused << " were refused";
    v1::AttendResponse response;
    const grpc::Status status = Attend(server, large.request, &response);
    if (status.ok()) {
      EXPECT_TRUE(response.raw(0) == large.request.raw(2));
      continue;
    }
    EXPECT_TRUE(IsRefusal(status)) << status.error_code() << " " << status.error_message();
    ++refused;
  }
  grpc::Status status(StatusCode::UNAVAILABLE, "");
  for (int sent = 0; !status.ok(); ++sent) {
    ASSERT_LT(sent, kSmallMost) << "small ones are refused for good: " << status.error_message();
    v1::AttendResponse response;
    status = Attend(server, small.request, &response);
    EXPECT_TRUE(status.ok() || IsRefusal(status)) << status.error_message();
    if (status.ok()) {
      EXPECT_EQ(test::Judge(small, response), "");
    }
  }
  Engine& engine = server.server().engine();
  const TimePoint until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  EXPECT_TRUE(engine.WaitIdle(until));
  while (engine.host_pool().used_bytes() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_EQ(engine.host_pool().used_bytes(), 0) << "an ended call's memory";
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"memory\"}"), 0) << "not its own";
}

TEST(MessageMemoryTest, MessagesWithinTheBoundAreServed) {
  TestServer server([](Config& config) { config.message_memory_max_bytes = 256 << 20; });
  server.backend().SetCompute(Compute);
  const WireProblem large = test::PlainWireProblem(1, kLargeLength, 64);
  for (int i = 0; i < 3; ++i) {
    v1::AttendResponse response;
    const grpc::Status status = Attend(server, large.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(response.raw(0) == large.request.raw(2));
    const test::ChunkedOutcome chunked =
        test::AttendOverStreams(server, large.request, 2, 1 << 20, 1);
    ASSERT_TRUE(chunked.ok()) << chunked.statuses[0].error_message();
    EXPECT_TRUE(chunked.response.raw(0) == large.request.raw(2));
  }
}

}  // namespace
}  // namespace attend
