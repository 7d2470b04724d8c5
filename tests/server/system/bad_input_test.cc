// SPDX-License-Identifier: Apache-2.0
//
// Every way in which a request can be invalid, sent to a real server: each gets its status and a
// message that names field, value and bound, changes nothing else, and the next valid request is
// answered.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/server/support/bad_requests.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

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
    // The count and the memory are released a moment after the client has its answer.
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

TEST_F(BadInputTest, BadShapesAreRefused) { Try(test::BadShapes()); }
TEST_F(BadInputTest, MismatchedTensorsAreRefused) { Try(test::BadMatches()); }
TEST_F(BadInputTest, WrongByteCountsAreRefused) { Try(test::BadBytes()); }
TEST_F(BadInputTest, BadValuesAreRefused) { Try(test::BadValues()); }
TEST_F(BadInputTest, BadTermsAreRefused) { Try(test::BadTerms()); }
TEST_F(BadInputTest, BadLengthsAreRefused) { Try(test::BadLengths()); }
TEST_F(BadInputTest, BadBiasesAreRefused) { Try(test::BadBiases()); }
TEST_F(BadInputTest, BadTreesAreRefused) { Try(test::BadTrees()); }

TEST(BadInputMetricsTest, BadRequestsAreCountedAndLogged) {
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

}  // namespace
}  // namespace attend
