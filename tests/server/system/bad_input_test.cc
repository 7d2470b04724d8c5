// SPDX-License-Identifier: Apache-2.0
//
// Every way a request can be wrong, sent to a real server: each gets its status and a message that
// names field, value and bound, changes nothing else, and the next good request is answered.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/server/support/bad_requests.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::BadRequest;
using test::TestServer;
using test::WireProblem;

class BadInputTest : public ::testing::Test {
 protected:
  void ExpectGoodAnswer() {
    WireProblem good = test::PlainWireProblem(random_());
    v1::AttendResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->Attend(&context, good.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(good, response), "");
    EXPECT_EQ(response.request_id(), good.request.request_id());
  }

  void ExpectNothingHeld() {
    // Counted down, and memory given back, a moment after the client has its answer.
    while (server_.server().engine().inflight() > 0) usleep(100);
    while (server_.server().engine().host_pool().used_bytes() > 0) usleep(100);
  }

  void Try(const std::vector<BadRequest>& bad_requests) {
    for (const BadRequest& bad : bad_requests) {
      SCOPED_TRACE(bad.name);
      v1::AttendRequest request = test::PlainWireProblem(random_()).request;
      bad.spoil(request);
      const int64_t accepted = server_.backend().submitted_items();
      v1::AttendResponse response;
      grpc::ClientContext context;
      const grpc::Status status = stub_->Attend(&context, request, &response);
      EXPECT_EQ(status.error_code(), bad.code) << status.error_message();
      for (const std::string& part : bad.says) {
        EXPECT_NE(status.error_message().find(part), std::string::npos)
            << "\"" << part << "\" is not in \"" << status.error_message() << "\"";
      }
      EXPECT_EQ(server_.backend().submitted_items(), accepted);
      ExpectGoodAnswer();
    }
    ExpectNothingHeld();
  }

  std::mt19937_64 random_{test::FreshSeed()};
  TestServer server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_ = server_.Stub();
};

TEST_F(BadInputTest, Shapes) { Try(test::BadShapes()); }
TEST_F(BadInputTest, Matches) { Try(test::BadMatches()); }
TEST_F(BadInputTest, Bytes) { Try(test::BadBytes()); }
TEST_F(BadInputTest, Values) { Try(test::BadValues()); }
TEST_F(BadInputTest, Terms) { Try(test::BadTerms()); }
TEST_F(BadInputTest, Lengths) { Try(test::BadLengths()); }
TEST_F(BadInputTest, Biases) { Try(test::BadBiases()); }

TEST(BadInputMetricsTest, AreCountedAndLogged) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const auto stub = server.Stub();
  v1::AttendRequest request = test::PlainWireProblem(1).request;
  request.set_request_id("the\nclient's");
  request.set_priority(1000);
  v1::AttendResponse response;
  grpc::ClientContext context;
  EXPECT_FALSE(stub->Attend(&context, request, &response).ok());
  EXPECT_EQ(server.Metric("attend_requests_total{code=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"invalid\"}"), 1);
  const std::string log = server.log();
  EXPECT_NE(log.find("request_id=\"the\\nclient's\" code=\"INVALID_ARGUMENT\""), std::string::npos)
      << log;
  EXPECT_NE(log.find("peer=\"ipv4:127.0.0.1:"), std::string::npos) << log;
}

TEST_F(BadInputTest, TruncatedAndRandomBytes) {
  const std::shared_ptr<grpc::Channel> channel = server_.Connect();
  const std::string good = test::PlainWireProblem(2, 2, 2).request.SerializeAsString();
  v1::AttendResponse response;
  for (size_t length = 0; length < good.size(); ++length) {
    const grpc::Status status = test::SendBytes(channel, good.substr(0, length), &response);
    ASSERT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << "cut at " << length;
    ASSERT_FALSE(status.error_message().empty());
  }
  for (int i = 0; i < 500; ++i) {
    std::string bytes(random_() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    const grpc::Status status = test::SendBytes(channel, bytes, &response);
    ASSERT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  }
  ASSERT_TRUE(test::SendBytes(channel, good, &response).ok());
  ExpectNothingHeld();
}

TEST_F(BadInputTest, LyingLengthOverTheWire) {
  v1::AttendRequest header = test::PlainWireProblem(3).request;
  header.clear_raw();
  const std::string lying =
      header.SerializeAsString() + std::string("\xc2\x3e\x80\x80\x80\x80\x10", 7) + "abcd";
  v1::AttendResponse response;
  const grpc::Status status = test::SendBytes(server_.Connect(), lying, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("declares 4294967296 bytes, 4 are left"), std::string::npos)
      << status.error_message();
  ExpectGoodAnswer();
}

TEST_F(BadInputTest, EmptyTensorsAreFine) {
  for (const auto& [len_q, len_k, batch] : {std::tuple{0, 8, 1}, {8, 0, 1}, {0, 0, 1}, {8, 8, 0}}) {
    WireProblem problem;
    problem.spec = test::MakeSpec(batch, 2, 1, len_q, len_k, 16, 8);
    problem.owned = test::MakeAttention(problem.spec, 5);
    problem.request = test::ToRequest(problem.spec, problem.owned);
    v1::AttendResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->Attend(&context, problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problem, response), "");
  }
}

TEST_F(BadInputTest, NanAndInfDataAreComputed) {
  WireProblem problem = test::PlainWireProblem(6);
  const Attention& a = problem.owned.attention;
  test::Set(a, problem.owned.Q(0, 0, 1, 2), std::numeric_limits<float>::quiet_NaN());
  test::Set(a, problem.owned.V(0, 1, 3, 0), std::numeric_limits<float>::infinity());
  problem.request = test::ToRequest(problem.spec, problem.owned);
  v1::AttendResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->Attend(&context, problem.request, &response).ok());
  EXPECT_EQ(test::Judge(problem, response), "");
  const auto* o = reinterpret_cast<const float*>(response.raw(0).data());
  EXPECT_TRUE(std::isnan(o[16]));  // head 0, row 1
  EXPECT_FALSE(std::isnan(o[0]));  // head 0, row 0
  ExpectGoodAnswer();
}

TEST_F(BadInputTest, CompressedMessagesAreRefusedCleanly) {
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    v1::AttendRequest request = test::PlainWireProblem(7, 64, 64).request;
    v1::AttendResponse response;
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    const grpc::Status status = stub_->Attend(&context, request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED) << status.error_message();
    EXPECT_NE(status.error_message().find("ompression"), std::string::npos)
        << status.error_message();
    ExpectGoodAnswer();
  }
}

}  // namespace
}  // namespace attend
