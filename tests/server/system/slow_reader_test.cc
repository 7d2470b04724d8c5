// SPDX-License-Identifier: Apache-2.0
//
// Clients that do not read their answers, for each of the three ways to call: they hold the blocks
// of their own answers. When those fill the memory, others are refused with a retry hint and
// requests that still fit are served. When a reader disconnects, resumes, or does not read for
// --write-timeout, its memory is free again.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "server/engine/engine.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/health_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::ChunkedStreamClient;
using test::TestServer;
using test::WireProblem;

enum class Way { kUnary, kStream, kChunked };
constexpr Way kWays[] = {Way::kUnary, Way::kStream, Way::kChunked};

// A small request with a large answer: one key, so that every row of O is V's only row. Larger than
// the socket buffers and windows of an unread connection.
constexpr int64_t kRows = 32768;
constexpr int64_t kDimV = 256;
constexpr int64_t kAnswerBytes = kRows * kDimV * 4;  // 32 MiB, as large as its block

v1::AttendRequest LargeRequest() {
  v1::AttendRequest request;
  const auto add = [&](v1::Tensor* tensor, int64_t rows, int64_t dim) {
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    for (const int64_t size : {int64_t{1}, int64_t{1}, rows, dim}) tensor->add_shape(size);
    std::vector<float> values(static_cast<size_t>(rows * dim));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);
    request.add_raw(values.data(), values.size() * sizeof(float));
  };
  add(request.mutable_q(), kRows, 1);
  add(request.mutable_k(), 1, 1);
  add(request.mutable_v(), 1, kDimV);
  return request;
}

void Compute(const Attention& a) {
  if (a.problem.len_q != kRows) return CpuReference(a);
  for (int64_t row = 0; row < kRows; ++row) {
    std::memcpy(static_cast<float*>(a.o.data) + row * kDimV, a.v.data, kDimV * sizeof(float));
  }
}

void ExpectLargeAnswer(const v1::AttendRequest& request, const v1::AttendResponse& response) {
  ASSERT_EQ(response.raw_size(), 1);
  ASSERT_EQ(response.raw(0).size(), size_t{kAnswerBytes});
  const std::string& row = request.raw(2);
  for (size_t at = 0; at < response.raw(0).size(); at += row.size()) {
    ASSERT_EQ(response.raw(0).compare(at, row.size(), row), 0) << "row " << at / row.size();
  }
}

void SendChunked(ChunkedStreamClient& client, const v1::AttendRequest& request) {
  client.SendHeader(test::ChunkedHeader(request));
  for (int i = 0; i < request.raw_size(); ++i) client.SendChunk(i + 1, 0, request.raw(i));
  client.HalfClose();
}

// Sends at once and reads when told to. Disconnects on destruction.
class SlowReader {
 public:
  SlowReader(const TestServer& server, Way way, const v1::AttendRequest& request) {
    if (way == Way::kChunked) {
      chunked_ = std::make_unique<ChunkedStreamClient>(server);
      SendChunked(*chunked_, request);
      return;
    }
    const std::string method = way == Way::kUnary ? "Attend" : "AttendStream";
    raw_ = std::make_unique<test::BytesStream>(
        server.Connect(), "/attend.v1.AttentionService/" + method, request.SerializeAsString());
  }
  ~SlowReader() {
    if (chunked_) chunked_->Cancel();
  }

  v1::AttendResponse Read() {
    v1::AttendResponse response;
    std::string bytes;
    if (raw_) {
      EXPECT_TRUE(raw_->Read(&bytes));
      EXPECT_TRUE(response.ParseFromString(bytes));
      return response;
    }
    test::AnswerBuilder answer;
    v1::AttendChunkedResponse message;
    while (chunked_->Receive(&message)) answer.Add(message);
    const grpc::Status status = chunked_->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::string fault;
    response = answer.Build(&fault);
    EXPECT_EQ(fault, "");
    return response;
  }

 private:
  std::unique_ptr<test::BytesStream> raw_;
  std::unique_ptr<ChunkedStreamClient> chunked_;
};

struct Outcome {
  grpc::Status status;
  int64_t retry_after_ms = 0;
  v1::AttendResponse response;
};

// An ordinary client.
Outcome Call(const TestServer& server, Way way, const v1::AttendRequest& request) {
  Outcome outcome;
  if (way == Way::kChunked) {
    ChunkedStreamClient client(server);
    SendChunked(client, request);
    test::AnswerBuilder answer;
    v1::AttendChunkedResponse message;
    while (client.Receive(&message)) answer.Add(message);
    outcome.status = client.Finish();
    outcome.retry_after_ms = client.PushbackMs();
    std::string fault;
    if (outcome.status.ok()) outcome.response = answer.Build(&fault);
    EXPECT_EQ(fault, "");
    return outcome;
  }
  const auto stub = server.Stub();
  grpc::ClientContext context;
  if (way == Way::kUnary) {
    outcome.status = stub->Attend(&context, request, &outcome.response);
    const auto& metadata = context.GetServerTrailingMetadata();
    const auto found = metadata.find("grpc-retry-pushback-ms");
    if (found != metadata.end()) {
      outcome.retry_after_ms =
          std::atoi(std::string(found->second.data(), found->second.size()).c_str());
    }
    return outcome;
  }
  const auto stream = stub->AttendStream(&context);
  stream->Write(request);
  stream->WritesDone();
  EXPECT_TRUE(stream->Read(&outcome.response));
  EXPECT_TRUE(stream->Finish().ok());
  const v1::RequestStatus& status = outcome.response.status();
  outcome.status = grpc::Status(static_cast<StatusCode>(status.code()), status.message());
  outcome.retry_after_ms = status.retry_after_ms();
  return outcome;
}

class SlowReaderTest : public ::testing::TestWithParam<Way> {};

TEST_P(SlowReaderTest, HoldsOnlyItsOwnAnswer) {
  const Way way = GetParam();
  const Way other = kWays[(static_cast<size_t>(way) + 1) % std::size(kWays)];
  // Two held answers, and room for small requests but not for a third such answer.
  TestServer server([](Config& config) {
    config.memory_budget_bytes = kAnswerBytes / 2 * 5;
    config.write_timeout_seconds = 0;
  });
  server.backend().SetCompute(Compute);
  HostPool& pool = server.server().engine().host_pool();
  const auto await_held = [&](int64_t answers) {
    while (pool.used_bytes() != answers * kAnswerBytes) std::this_thread::yield();
  };
  const v1::AttendRequest large = LargeRequest();
  WireProblem small = test::PlainWireProblem(1);

  auto leaves = std::make_unique<SlowReader>(server, way, large);
  await_held(1);
  SlowReader reads(server, way, large);
  await_held(2);
  const Outcome refused = Call(server, other, large);
  EXPECT_EQ(refused.status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(refused.status.error_message().find("tensor memory"), std::string::npos)
      << refused.status.error_message();
  EXPECT_GE(refused.retry_after_ms, 100) << "memory comes back with whole answers";
  const Outcome small_one = Call(server, other, small.request);
  ASSERT_TRUE(small_one.status.ok()) << small_one.status.error_message();
  EXPECT_EQ(test::Judge(small, small_one.response), "");
  await_held(2);

  leaves.reset();
  await_held(1);
  const Outcome served = Call(server, other, large);
  EXPECT_TRUE(served.status.ok()) << served.status.error_message();
  ExpectLargeAnswer(large, served.response);
  await_held(1);
  ExpectLargeAnswer(large, reads.Read());
  await_held(0);
}

TEST_P(SlowReaderTest, LosesAnUnreadAnswerAfterTheTimeout) {
  TestServer server([](Config& config) {
    config.memory_budget_bytes = kAnswerBytes / 2 * 5;
    config.write_timeout_seconds = 0.5;
    config.metrics_listen = "127.0.0.1:0";
  });
  server.backend().SetCompute(Compute);
  HostPool& pool = server.server().engine().host_pool();
  const auto await_held = [&](int64_t answers) {
    while (pool.used_bytes() != answers * kAnswerBytes) std::this_thread::yield();
  };
  const v1::AttendRequest large = LargeRequest();
  const SlowReader first(server, GetParam(), large);
  await_held(1);
  await_held(0);
  EXPECT_GE(server.Metric("attend_unread_calls_total"), 1);
  EXPECT_NE(server.log().find("did not read its answer"), std::string::npos);
  const Outcome served = Call(server, GetParam(), large);
  EXPECT_TRUE(served.status.ok()) << served.status.error_message();
  ExpectLargeAnswer(large, served.response);

  const SlowReader second(server, GetParam(), large);
  await_held(1);
  EXPECT_TRUE(server.server().Drain(std::chrono::minutes(2))) << "no client waits for its answer";
}

TEST_P(SlowReaderTest, IsNamedWhenItDelaysTheDrain) {
  TestServer server([](Config& config) { config.write_timeout_seconds = 600; });
  server.backend().SetCompute(Compute);
  const SlowReader reader(server, GetParam(), LargeRequest());
  while (server.server().engine().host_pool().used_bytes() != kAnswerBytes) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(server.server().Drain(std::chrono::milliseconds(1)));
  EXPECT_NE(server.log().find("client held up the drain by not reading its answer peer=\"ipv4:"),
            std::string::npos)
      << server.log();
}

INSTANTIATE_TEST_SUITE_P(AllWays, SlowReaderTest, ::testing::ValuesIn(kWays), [](const auto& info) {
  return info.param == Way::kUnary ? "Unary" : info.param == Way::kStream ? "Stream" : "Chunked";
});

}  // namespace
}  // namespace attend
