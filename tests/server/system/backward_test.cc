// SPDX-License-Identifier: Apache-2.0
//
// Requests for gradients through a whole server on the CPU's kernels: every way to call, checked in
// double precision, and refusals with their messages.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/attention.grpc.pb.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/session_calls.h"
#include "tests/server/support/test_server.h"
#include "tests/server/support/wire_gradients.h"

namespace attend::test {
namespace {

using ::testing::HasSubstr;

grpc::Status Backward(const TestServer& server, const v1::AttendRequest& request,
                      v1::AttendResponse* response) {
  grpc::ClientContext context;
  return server.Stub()->Backward(&context, request, response);
}

grpc::Status OnStream(const TestServer& server, const v1::AttendRequest& request,
                      v1::AttendResponse* response) {
  grpc::ClientContext context;
  const auto stub = server.Stub();
  const auto stream = stub->AttendStream(&context);
  stream->Write(request);
  stream->WritesDone();
  stream->Read(response);
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return status;
  return {static_cast<grpc::StatusCode>(response->status().code()), response->status().message()};
}

void MetricsOn(Config& config) { config.metrics_listen = "127.0.0.1:0"; }

TEST(Backward, EveryFeatureHasRightGradientsByEveryWayToCall) {
  const uint64_t seed = FreshSeed();
  for (const auto kind : {TestServer::Devices::kPlain, TestServer::Devices::kStaging,
                          TestServer::Devices::kGathering}) {
    TestServer server([](Config& config) { config.staging_min_bytes = 1; }, 2, kind);
    const int rounds = std::max(12, static_cast<int>(40 * TestScale()));
    for (int n = 0; n < rounds; ++n) {
      const uint64_t one = seed + static_cast<uint64_t>(n);
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " n " + std::to_string(n));
      WireGradients gradients(RandomWireSpec(one, 3e4), one);
      v1::AttendResponse response;
      grpc::Status status;
      if (n % 3 == 0) status = Backward(server, gradients.request, &response);
      if (n % 3 == 1) status = OnStream(server, gradients.request, &response);
      if (n % 3 == 2) {
        const ChunkedOutcome outcome =
            AttendOverStreams(server, gradients.request, 1 + n % 4, 3000, one);
        EXPECT_EQ(outcome.fault, "");
        status = outcome.statuses[0];
        response = outcome.response;
      }
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(gradients.Judge(response), "");
      EXPECT_EQ(response.request_id(), gradients.request.request_id());
    }
  }
}

TEST(Backward, ReturnsExactlyTheGradientsAskedFor) {
  TestServer server(MetricsOn);
  ProblemSpec spec = MakeSpec(2, 4, 2, 9, 11, 16, 8);
  const uint64_t seed = FreshSeed();
  for (const std::vector<v1::TensorName>& wanted :
       {std::vector<v1::TensorName>{},
        {v1::TENSOR_NAME_D_K},
        {v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_Q, v1::TENSOR_NAME_D_V}}) {
    WireGradients gradients(spec, seed);
    gradients.request.mutable_backward()->mutable_wanted()->Assign(wanted.begin(), wanted.end());
    v1::AttendResponse response;
    ASSERT_TRUE(Backward(server, gradients.request, &response).ok());
    EXPECT_EQ(gradients.Judge(response), "");
    EXPECT_EQ(response.kernel(), "cpu_flash");
  }
  EXPECT_EQ(server.Metric("attend_backward_requests_total{code=\"OK\"}"), 3);
  EXPECT_EQ(server.Metric("attend_requests_total{code=\"OK\"}"), 3);
  const Attention& a = MakeAttention(spec, seed).attention;
  EXPECT_EQ(server.Metric("attend_flops_total{device=\"cpu\",dtype=\"float32\","
                          "kernel=\"cpu_flash\"}"),
            3 * BackwardFlops(a));
}

TEST(Backward, TheReferenceCheckFindsWrongGradients) {
  TestServer server(MetricsOn);
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < 20; ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " n " + std::to_string(n));
    WireGradients gradients(RandomWireSpec(seed + n, 3e4), seed + n);
    gradients.request.set_check(true);
    v1::AttendResponse response;
    ASSERT_TRUE(Backward(server, gradients.request, &response).ok());
    EXPECT_EQ(gradients.Judge(response), "");
    ASSERT_TRUE(response.has_check());
    EXPECT_TRUE(response.check().ok()) << response.check().detail();
    EXPECT_LE(response.check().rows_checked(), response.check().rows_total());
  }
  EXPECT_EQ(server.Metric("attend_reference_checks_total{result=\"ok\",transport=\"inline\"}"), 20);
  // LSE of different inputs.
  WireGradients gradients(MakeSpec(1, 2, 1, 20, 30, 8, 8), seed);
  gradients.request.set_check(true);
  std::string& lse = *gradients.request.mutable_raw(4);
  lse.assign(lse.size(), '\0');
  v1::AttendResponse response;
  ASSERT_TRUE(Backward(server, gradients.request, &response).ok());
  EXPECT_FALSE(response.check().ok());
  EXPECT_THAT(response.check().detail(), HasSubstr("O and LSE are not those of q, k and v"));
  // Not the server's fault, so no alert may fire.
  EXPECT_EQ(server.Metric("attend_reference_checks_total{result=\"inputs\",transport=\"inline\"}"),
            1);
  EXPECT_EQ(server.Metric("attend_reference_checks_total{result=\"failed\",transport=\"inline\"}"),
            0);
}

TEST(Backward, TheServersSamplingChecksGradientsToo) {
  TestServer server([](Config& config) { config.check_sample = 1; });
  WireGradients gradients(MakeSpec(1, 2, 1, 20, 30, 8, 8), FreshSeed());
  v1::AttendResponse response;
  ASSERT_TRUE(Backward(server, gradients.request, &response).ok());
  EXPECT_TRUE(response.check().ok()) << response.check().detail();
}

TEST(Backward, AMissingDLseCountsAsZero) {
  TestServer server;
  WireGradients gradients(MakeSpec(1, 2, 1, 5, 7, 8, 8), FreshSeed());
  std::string& d_lse = *gradients.request.mutable_raw(6);
  d_lse.assign(d_lse.size(), '\0');
  v1::AttendResponse with, without;
  ASSERT_TRUE(Backward(server, gradients.request, &with).ok());
  gradients.request.mutable_backward()->clear_d_lse();
  gradients.request.mutable_raw()->RemoveLast();
  ASSERT_TRUE(Backward(server, gradients.request, &without).ok());
  ASSERT_EQ(with.raw_size(), 3);
  for (int n = 0; n < 3; ++n) EXPECT_EQ(with.raw(n), without.raw(n));
}

TEST(Backward, EmptyGradientsHaveTheirEntries) {
  TestServer server;
  for (const auto& [rows, keys] : {std::pair{0, 5}, std::pair{5, 0}, std::pair{0, 0}}) {
    WireGradients gradients(MakeSpec(1, 2, 1, rows, keys, 8, 8), FreshSeed());
    v1::AttendResponse response;
    ASSERT_TRUE(Backward(server, gradients.request, &response).ok());
    EXPECT_EQ(gradients.Judge(response), "");
  }
}

TEST(Backward, ForwardAndBackwardRequestsAreRefusedByTheOtherCall) {
  TestServer server(MetricsOn);
  WireGradients gradients(MakeSpec(1, 2, 2, 4, 4, 8, 8), 1);
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status attend = server.Stub()->Attend(&context, gradients.request, &response);
  EXPECT_EQ(attend.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(attend.error_message(), HasSubstr("backward is set, must be unset with Attend"));
  const WireProblem forward = PlainWireProblem(1);
  const grpc::Status backward = Backward(server, forward.request, &response);
  EXPECT_EQ(backward.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(backward.error_message(), HasSubstr("backward is not set"));
  EXPECT_EQ(server.Metric("attend_backward_requests_total{code=\"INVALID_ARGUMENT\"}"), 1);
}

struct Bad {
  const char* name;
  void (*spoil)(v1::AttendRequest&);
  const char* says;
  grpc::StatusCode code = grpc::StatusCode::INVALID_ARGUMENT;
};

// For a request B1 Hq4 Hkv2 Lq6 Lk8 D16 Dv8.
const Bad kBad[] = {
    {"no o", [](auto& r) { r.mutable_backward()->clear_o(); }, "backward.o is not set"},
    {"no lse", [](auto& r) { r.mutable_backward()->clear_lse(); }, "backward.lse is not set"},
    {"no d_o", [](auto& r) { r.mutable_backward()->clear_d_o(); }, "backward.d_o is not set"},
    {"rank", [](auto& r) { r.mutable_backward()->mutable_d_o()->mutable_shape()->RemoveLast(); },
     "backward.d_o.shape [1, 4, 6] has 3 dimensions, must have 4: [B, Hq, Lq, Dv]"},
    {"rows", [](auto& r) { r.mutable_backward()->mutable_o()->set_shape(2, 7); },
     "backward.o.shape[2] (Lq) is 7, must equal q's 6"},
    {"heads", [](auto& r) { r.mutable_backward()->mutable_d_o()->set_shape(1, 2); },
     "backward.d_o.shape[1] (Hq) is 2, must equal q's 4"},
    {"dim", [](auto& r) { r.mutable_backward()->mutable_d_o()->set_shape(3, 16); },
     "backward.d_o.shape[3] (Dv) is 16, must equal v's 8"},
    {"lse rows", [](auto& r) { r.mutable_backward()->mutable_lse()->set_shape(2, 5); },
     "backward.lse.shape[2] (Lq) is 5, must equal q's 6"},
    {"d_lse heads", [](auto& r) { r.mutable_backward()->mutable_d_lse()->set_shape(1, 1); },
     "backward.d_lse.shape[1] (Hq) is 1, must equal q's 4"},
    {"lse dtype",
     [](auto& r) { r.mutable_backward()->mutable_lse()->set_dtype(v1::DTYPE_FLOAT16); },
     "backward.lse.dtype is float16, must equal LSE's float32"},
    {"d_o dtype",
     [](auto& r) { r.mutable_backward()->mutable_d_o()->set_dtype(v1::DTYPE_BFLOAT16); },
     "backward.d_o.dtype is bfloat16, must equal O's float32"},
    {"few bytes", [](auto& r) { r.mutable_raw(5)->pop_back(); },
     "raw[5] has 767 bytes, must have 768, the bytes of backward.d_o"},
    {"no bytes", [](auto& r) { r.mutable_raw()->RemoveLast(); },
     "raw has 6 entries, must have 7, one for each of q, k, v, backward.o, backward.lse, "
     "backward.d_o, backward.d_lse"},
    {"a wish", [](auto& r) { r.mutable_backward()->add_wanted(v1::TENSOR_NAME_Q); },
     "an entry of backward.wanted is 1, must be D_Q (9)"},
    {"no bias", [](auto& r) { r.mutable_backward()->add_wanted(v1::TENSOR_NAME_D_BIAS); },
     "d_bias is requested, but there is no bias"},
    {"bias of bits",
     [](auto& r) {
       r.mutable_backward()->add_wanted(v1::TENSOR_NAME_D_BIAS);
       r.mutable_bias()->set_dtype(v1::DTYPE_BIT);
       for (const int64_t dim : {1, 1, 1, 8}) r.mutable_bias()->add_shape(dim);
     },
     "d_bias is requested, but the bias is a mask of bits"},
    {"dropout", [](auto& r) { r.set_dropout_p(2); }, "dropout_p is 2, must be in [0, 1 - 2^-17)"},
    {"no sinks", [](auto& r) { r.mutable_backward()->add_wanted(v1::TENSOR_NAME_D_SINKS); },
     "d_sinks are requested, but there are no sinks"},
    {"lse too", [](auto& r) { r.set_return_lse(true); }, "return_lse is set, must be unset with"},
    {"o placed", [](auto& r) { r.mutable_o_placement()->mutable_shared_memory(); },
     "o_placement is set, but o is not requested"},
    {"d_bias placed",
     [](auto& r) { r.mutable_backward()->mutable_d_bias_placement()->mutable_shared_memory(); },
     "backward.d_bias_placement is set, but d_bias is not requested"},
    {"a kernel", [](auto& r) { r.set_kernel("cuda_flash_sm90"); },
     "kernel cuda_flash_sm90 does not run on cpu", grpc::StatusCode::UNIMPLEMENTED},
    {"a name", [](auto& r) { r.set_kernel("fast"); }, "kernel is \"fast\", must be one of"},
};

TEST(Backward, ErrorsNameFieldAndBound) {
  TestServer server;
  for (const Bad& bad : kBad) {
    SCOPED_TRACE(bad.name);
    WireGradients gradients(MakeSpec(1, 4, 2, 6, 8, 16, 8), 1);
    bad.spoil(gradients.request);
    v1::AttendResponse response;
    const grpc::Status status = Backward(server, gradients.request, &response);
    EXPECT_EQ(status.error_code(), bad.code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(bad.says));
  }
  WireGradients good(MakeSpec(1, 4, 2, 6, 8, 16, 8), 1);
  v1::AttendResponse response;
  EXPECT_TRUE(Backward(server, good.request, &response).ok());
}

TEST(Backward, GradientsOfSessionsAreRefused) {
  TestServer server([](Config& config) { config.session_memory_bytes = int64_t{32} << 20; });
  SessionCalls calls(server);
  v1::CreateSessionRequest create;
  v1::LayerShape* const shape = create.add_shapes();
  shape->set_dtype(v1::DTYPE_FLOAT32);
  shape->set_heads_kv(2);
  shape->set_dim(16);
  v1::Session session;
  ASSERT_TRUE(calls.Create(create, session).ok());
  WireGradients gradients(MakeSpec(1, 2, 2, 4, 4, 16, 16), 1);
  gradients.request.add_sessions()->set_session(session.id());
  v1::AttendResponse response;
  const grpc::Status status = Backward(server, gradients.request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("gradients of keys in pages"));
  ASSERT_TRUE(calls.Get(session.id(), session).ok());
  EXPECT_EQ(session.length(), 0);
}

}  // namespace
}  // namespace attend::test
