// SPDX-License-Identifier: Apache-2.0
//
// Reference checks through a whole server: LSE is checked whether it is returned or not, and an
// answer that cannot be judged is sent with that verdict.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "attend/v1/attention.grpc.pb.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"
#include "tests/server/support/wire_gradients.h"

namespace attend::test {
namespace {

using ::testing::HasSubstr;

grpc::Status Attend(const TestServer& server, const v1::AttendRequest& request,
                    v1::AttendResponse* response) {
  grpc::ClientContext context;
  return server.Stub()->Attend(&context, request, response);
}

// At the client's request, or by the server's sampling.
TEST(Check, LseIsCheckedWhetherItIsReturnedOrNot) {
  for (const bool asked : {true, false}) {
    TestServer server([&](Config& config) { config.check_sample = asked ? 0 : 1; });
    for (const bool wrong : {false, true}) {
      server.backend().SetCompute([wrong](const Attention& a) {
        CpuReference(a);
        if (wrong && a.problem.return_lse) a.lse[3] += 1e-3f;
      });
      for (const bool returned : {false, true}) {
        WireProblem problem = PlainWireProblem(FreshSeed());
        problem.request.set_check(asked);
        problem.request.set_return_lse(returned);
        v1::AttendResponse response;
        ASSERT_TRUE(Attend(server, problem.request, &response).ok());
        EXPECT_EQ(response.has_lse(), returned);
        EXPECT_EQ(response.raw_size(), returned ? 2 : 1);
        ASSERT_TRUE(response.has_check());
        EXPECT_EQ(response.check().ok(), !wrong) << response.check().detail();
        EXPECT_FALSE(response.check().undecided());
        if (wrong) {
          EXPECT_THAT(response.check().detail(), HasSubstr("lse of"));
        }
      }
    }
  }
}

TEST(Check, WithoutACheckNoLseIsComputed) {
  TestServer server;
  bool computed = true;
  server.backend().SetCompute([&](const Attention& a) {
    CpuReference(a);
    computed = a.problem.return_lse;
  });
  WireProblem problem = PlainWireProblem(FreshSeed());
  problem.request.set_return_lse(false);
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(server, problem.request, &response).ok());
  EXPECT_FALSE(computed);
}

// With a mask of -1e9 on whole rows, fp32 does not determine their weights.
TEST(Check, AnUndecidableCheckStillAnswersAndIsReported) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  ProblemSpec spec = MakeSpec(1, 2, 1, 6, 20, 8, 8);
  spec.problem.has_bias = true;
  WireGradients gradients(spec, FreshSeed());
  v1::AttendRequest& backward = gradients.request;
  std::string& bias = *backward.mutable_raw(3);
  for (size_t n = 0; n < bias.size(); n += sizeof(float)) {
    constexpr float kMask = -1e9f;
    std::memcpy(bias.data() + n, &kMask, sizeof kMask);
  }
  v1::AttendRequest forward = backward;
  forward.clear_backward();
  forward.clear_raw();
  for (int n = 0; n < 4; ++n) forward.add_raw(backward.raw(n));
  forward.set_return_lse(true);
  v1::AttendResponse answer;
  ASSERT_TRUE(Attend(server, forward, &answer).ok());
  backward.set_raw(4, answer.raw(0));
  backward.set_raw(5, answer.raw(1));
  backward.set_check(true);
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status status = server.Stub()->Backward(&context, backward, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(response.gradients().has_d_q());
  EXPECT_FALSE(response.check().ok());
  EXPECT_TRUE(response.check().undecided()) << response.check().detail();
  EXPECT_GT(response.check().rows_unjudged(), 0);
  EXPECT_THAT(response.check().detail(), HasSubstr("fp32 leaves its weights open"));
  const std::string checks = "attend_reference_checks_total{result=\"";
  EXPECT_EQ(server.Metric(checks + "undecided\",transport=\"inline\"}"), 1);
  EXPECT_EQ(server.Metric(checks + "failed\",transport=\"inline\"}"), 0);
  EXPECT_EQ(server.Metric("attend_reference_check_rows_unjudged_total"),
            static_cast<double>(response.check().rows_unjudged()));
}

}  // namespace
}  // namespace attend::test
