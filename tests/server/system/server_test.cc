// SPDX-License-Identifier: Apache-2.0
//
// Whole servers: every request is answered as by the reference, for any size and order.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

TEST(ServerTest, AnswersAnyRequestExactly) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TestServer server;
  const auto stub = server.Stub();
  const int rounds = std::max(20, static_cast<int>(200 * test::TestScale()));
  for (int i = 0; i < rounds; ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i);
    problem.request.set_check(i % 4 == 0);
    v1::AttendResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub->Attend(&context, problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message() << Describe(problem.spec);
    EXPECT_EQ(test::Judge(problem, response), "") << Describe(problem.spec);
    EXPECT_EQ(response.request_id(), problem.request.request_id());
    EXPECT_EQ(response.device(), "cpu");
    EXPECT_EQ(response.transport(), "inline");
    EXPECT_GE(response.batch_requests(), 1);
    EXPECT_GT(response.timings().total_ns(), 0);
    EXPECT_EQ(response.has_check(), problem.request.check());
    EXPECT_TRUE(!response.has_check() || response.check().ok()) << response.check().detail();
  }
}

TEST(ServerTest, LargeRequestsAreCopiedByThreadsInAnyFieldOrder) {
  const uint64_t seed = test::FreshSeed();
  std::mt19937_64 random(seed);
  TestServer server([](Config& config) { config.copy_threads = 3; });
  // Computing would take long; the test is whether every byte of V arrives: O is V's first rows.
  server.backend().SetCompute([](const Attention& a) {
    std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
  });
  const auto channel = server.Connect();
  for (const bool shuffled : {false, true}) {
    WireProblem problem = test::PlainWireProblem(seed, 6000, 128);  // 18 MiB
    const std::string bytes = problem.request.SerializeAsString();
    v1::AttendResponse response;
    const grpc::Status status =
        test::SendBytes(channel, shuffled ? test::Shuffled(bytes, random) : bytes, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(response.raw(0) == problem.request.raw(2));
  }
}

TEST(ServerTest, AnswersAboveTheLimitAreRefused) {
  TestServer server([](Config& config) { config.max_request_bytes = 4096; });
  WireProblem wide;
  wide.spec = test::MakeSpec(1, 1, 1, 64, 1, 1, 256);
  wide.owned = test::MakeAttention(wide.spec, 1);
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status status =
      server.Stub()->Attend(&context, test::ToRequest(wide.spec, wide.owned), &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_EQ(status.error_message(),
            "the answer would have 65792 tensor bytes, must have at most 4096 "
            "(--max-request-bytes)");
}

}  // namespace
}  // namespace attend
