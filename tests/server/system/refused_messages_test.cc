// SPDX-License-Identifier: Apache-2.0
//
// Refusals before a message becomes a request: messages above the limit, unknown methods. Each is
// counted and logged, and not retryable.

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <future>

#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

class RefusedMessagesTest : public ::testing::Test {
 protected:
  double Metric(const std::string& sample) const { return server_.Metric(sample); }

  // Calls the method with a message of this many bytes (an even number), all in unknown fields.
  grpc::Status Call(const std::string& method, size_t bytes) const {
    grpc::GenericStub stub(server_.Connect());
    grpc::ClientContext context;
    std::string message;
    while (message.size() < bytes) message += std::string("\x78\x00", 2);
    const grpc::Slice slice(message);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer answer;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, method, grpc::StubOptions(), &request, &answer,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    return done.get_future().get();
  }

  TestServer server_{[](Config& config) {
    config.max_request_bytes = 1 << 20;
    config.metrics_listen = "127.0.0.1:0";
  }};
  const WireProblem small_ = test::PlainWireProblem(1, 4, 4);
  const WireProblem large_ = test::PlainWireProblem(2, 512, 128);  // 1.5 MiB
  const std::string large_bytes_ = std::to_string(large_.request.ByteSizeLong());
};

TEST_F(RefusedMessagesTest, AMessageAboveTheLimitIsCountedAndNotRetryable) {
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status status = server_.Stub()->Attend(&context, large_.request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  const std::string words =
      "the message has " + large_bytes_ + " bytes, must have at most 1048576 (--max-request-bytes)";
  EXPECT_EQ(status.error_message(), words);
  EXPECT_EQ(context.GetServerTrailingMetadata().count("grpc-retry-pushback-ms"), 0u);
  EXPECT_EQ(Metric("attend_rejected_requests_total{reason=\"too_large\"}"), 1);
  EXPECT_EQ(Metric("attend_requests_total{code=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_NE(server_.log().find(
                "request failed id=1 request_id=\"\" code=\"INVALID_ARGUMENT\" error=\"" + words),
            std::string::npos)
      << server_.log();
}

TEST_F(RefusedMessagesTest, OnAStreamALargeMessageFailsAlone) {
  grpc::ClientContext context;
  const auto stub = server_.Stub();
  const auto stream = stub->AttendStream(&context);
  v1::AttendResponse response;
  for (const auto* problem : {&large_, &small_}) {
    ASSERT_TRUE(stream->Write(problem->request));
    ASSERT_TRUE(stream->Read(&response));
    const bool fits = problem == &small_;
    EXPECT_EQ(response.status().code(), fits ? 0 : static_cast<int>(Code::kInvalidArgument));
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(Metric("attend_rejected_requests_total{reason=\"too_large\"}"), 1);
}

TEST_F(RefusedMessagesTest, ServerInfoRefusesLargeMessages) {
  const std::string info = "/attend.v1.AttentionService/GetServerInfo";
  EXPECT_TRUE(Call(info, 0).ok());
  EXPECT_TRUE(Call(info, 4096).ok());
  const grpc::Status large = Call(info, 64 << 10);
  EXPECT_EQ(large.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(large.error_message(), "the message has 65536 bytes, must have at most 4096");
  const grpc::Status larger = Call(info, 1 << 20);
  EXPECT_EQ(larger.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(larger.error_message(), "a message has 1048576 bytes, must have at most 131072");
}

TEST_F(RefusedMessagesTest, FarLargerMessagesAreRefusedByTheirLength) {
  const std::string service = "/attend.v1.AttentionService/";
  for (const char* method : {"Attend", "AttendStream", "AttendChunked"}) {
    const grpc::Status status = Call(service + method, (2 << 20) + 2);
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(status.error_message(),
              "a message has 2097154 bytes, must have at most 2097152 (twice " +
                  std::string(method == std::string("AttendChunked")
                                  ? "GetServerInfo's limits.chunk_bytes_max)"
                                  : "--max-request-bytes)"));
  }
}

TEST_F(RefusedMessagesTest, UnknownMethodsAreCountedAndLogged) {
  const grpc::Status status = Call("/attend.v1.AttentionService/Nothing", 10);
  EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(status.error_message(), "unknown method /attend.v1.AttentionService/Nothing");
  EXPECT_EQ(Call("/other", 0).error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Metric("attend_rejected_requests_total{reason=\"unknown_method\"}"), 2);
  EXPECT_EQ(Metric("attend_requests_total{code=\"UNIMPLEMENTED\"}"), 2);
  EXPECT_NE(server_.log().find("error=\"unknown method /other\""), std::string::npos)
      << server_.log();
}

}  // namespace
}  // namespace attend
