// SPDX-License-Identifier: Apache-2.0
//
// Limits on the resources of an AttendChunked request, and their refusals.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>

#include "server/engine/engine.h"
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

int64_t UsedBytes(TestServer& server) { return server.server().engine().host_pool().used_bytes(); }

struct Sizes {
  int64_t batch, heads_q, heads_kv, len_q, len_k, dim, dim_v;
};

v1::AttendRequest HeaderOf(const Sizes& s) {
  v1::AttendRequest header;
  const auto set = [](v1::Tensor* tensor, int64_t batch, int64_t heads, int64_t len, int64_t dim) {
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    for (const int64_t size : {batch, heads, len, dim}) tensor->add_shape(size);
    tensor->mutable_chunked();
  };
  set(header.mutable_q(), s.batch, s.heads_q, s.len_q, s.dim);
  set(header.mutable_k(), s.batch, s.heads_kv, s.len_k, s.dim);
  set(header.mutable_v(), s.batch, s.heads_kv, s.len_k, s.dim_v);
  return header;
}

TEST(ChunkedLimitsTest, ARequestThatCanNeverFitIsNotRetryable) {
  TestServer server;
  const Sizes cases[] = {
      {1 << 4, 1 << 8, 1 << 8, 1, 1 << 30, 64, 64},         // 2^51 bytes of tensors
      {1 << 15, 1 << 8, 1 << 8, 1, 1 << 30, 64, 64},        // above 2^62
      {1 << 20, 1 << 8, 1, 1 << 25, 1, 1, 192},             // 3 * 2^61 bytes of answer
      {1 << 16, 1 << 8, 1, 1 << 28, 1 << 20, 255, 256},     // 2^62 each, rounded up
      {1 << 15, 1 << 8, 1 << 8, 1 << 30, 1 << 30, 64, 64},  // 3 * 2^61, and 2^61 bytes of answer
  };
  for (const Sizes& sizes : cases) {
    ChunkedStreamClient client(server);
    ASSERT_TRUE(client.SendHeader(HeaderOf(sizes)));
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find("memory budget of 4294967296"), std::string::npos)
        << status.error_message();
    EXPECT_EQ(client.PushbackMs(), -1);
    EXPECT_EQ(UsedBytes(server), 0);
  }
}

TEST(ChunkedLimitsTest, ChunksAndHeadersStayBelowTheMessageLimit) {
  constexpr int64_t kMax = 300 << 10;
  TestServer server([](Config& config) { config.max_request_bytes = kMax; });
  const WireProblem problem = test::PlainWireProblem(1, 2048, 64);  // 1 MiB per tensor
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  ASSERT_TRUE(server.Stub()->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.limits().chunk_bytes_max(), kMax);
  ChunkedStreamClient client(server), more(server), header(server);
  ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
  EXPECT_EQ(client.Receive().grant().chunk_bytes_max(), kMax);
  for (int i = 0; i < 3; ++i) {
    const std::string& raw = problem.request.raw(i);
    for (size_t at = 0; at < raw.size(); at += kMax) {
      client.SendChunk(i + 1, at, raw.substr(at, kMax));
    }
  }
  const grpc::Status status = client.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_TRUE(more.SendHeader(ChunkedHeader(problem.request)));
  more.SendChunk(1, 0, problem.request.raw(0).substr(0, kMax + 1));
  EXPECT_NE(more.Finish().error_message().find("data has 307201 bytes, must have 1 to 307200"),
            std::string::npos);
  v1::AttendRequest large = ChunkedHeader(problem.request);
  large.set_kernel(std::string(kMax, 'k'));
  header.SendHeader(large);
  const grpc::Status refused = header.Finish();
  EXPECT_EQ(refused.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(refused.error_message().find("the header has 307"), std::string::npos)
      << refused.error_message();
}

TEST(ChunkedLimitsTest, UploadsLeaveAQuarterOfTheMemoryFree) {
  TestServer server([](Config& config) { config.memory_budget_bytes = 40 << 10; });
  const WireProblem half = test::PlainWireProblem(1, 32);  // 16 KiB with its answer
  const WireProblem small = test::PlainWireProblem(2, 8);  // 4 KiB with its answer
  ChunkedStreamClient holder(server), refused(server), never(server), later(server);
  ASSERT_TRUE(holder.SendHeader(ChunkedHeader(half.request)));
  EXPECT_TRUE(holder.Receive().has_grant());
  ASSERT_TRUE(refused.SendHeader(ChunkedHeader(half.request)));  // the budget has room for it
  const grpc::Status status = refused.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_message().find("of at most 30720, of which"), std::string::npos)
      << status.error_message();
  EXPECT_GE(refused.PushbackMs(), 100);
  ASSERT_TRUE(never.SendHeader(ChunkedHeader(test::PlainWireProblem(3, 64).request)));
  EXPECT_EQ(never.Finish().error_code(), StatusCode::INVALID_ARGUMENT);
  v1::AttendResponse answer;
  grpc::ClientContext unary;
  EXPECT_TRUE(server.Stub()->Attend(&unary, small.request, &answer).ok());
  // Complete requests and failed ones do not count as uploads.
  server.backend().Hold();
  for (int i = 0; i < 3; ++i) holder.SendChunk(i + 1, 0, half.request.raw(i));
  server.backend().WaitForWaiting(1);
  ASSERT_TRUE(later.SendHeader(ChunkedHeader(half.request)));
  EXPECT_TRUE(later.Receive().has_grant());
  later.Cancel();
  later.Finish();
  server.backend().Release();
  EXPECT_TRUE(holder.Finish().ok());
  while (UsedBytes(server) > 0) std::this_thread::yield();
  EXPECT_TRUE(test::AttendOverStreams(server, half.request, 2, 1000, 1).ok());
}

TEST(ChunkedLimitsTest, RequiredProgressDependsOnTheUploadsSize) {
  TestServer server([](Config& config) { config.chunked_idle_timeout_seconds = 0.1; });
  const WireProblem problem = test::PlainWireProblem(1, 8192, 64);  // 4 MiB per tensor
  ChunkedStreamClient client(server);
  ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
  client.SendChunk(1, 0, problem.request.raw(0).substr(0, 100000));
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_NE(status.error_message().find("fewer than 786432 bytes arrived in 100 ms"),
            std::string::npos)
      << status.error_message();
}

TEST(ChunkedLimitsTest, ARejectedRequestIsCountedOnce) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const WireProblem problem = test::PlainWireProblem(1);
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    ChunkedStreamClient first(server), second(server);
    ASSERT_TRUE(first.SendHeader(ChunkedHeader(problem.request)));
    ASSERT_TRUE(second.SendToken(first.Receive().grant().token()));
    EXPECT_TRUE(second.Receive().has_grant());
    std::thread other([&] { second.SendChunk(1, 5000, "abc"); });
    first.SendChunk(1, 5000, "abc");
    other.join();
    EXPECT_EQ(first.Finish().error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(second.Finish().error_code(), StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"invalid\"}"), kRounds);
}

}  // namespace
}  // namespace attend
