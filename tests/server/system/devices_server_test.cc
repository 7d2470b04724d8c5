// SPDX-License-Identifier: Apache-2.0
//
// Whole servers with several devices, as seen by clients and Prometheus.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <string>

#include "server/engine/engine.h"
#include "tests/server/support/health_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

void WithMetrics(Config& config) {
  config.metrics_listen = "127.0.0.1:0";
  config.memory_budget_bytes = 1 << 24;
  config.lanes = 1;
}

TEST(DevicesServerTest, ALostDeviceIsReportedAndTheOtherServes) {
  TestServer server(WithMetrics, /*devices=*/2);
  const auto stub = server.Stub();
  const uint64_t seed = test::FreshSeed();
  server.backend(0).LoseDevice();
  const auto attend = [&](const WireProblem& problem, v1::AttendResponse* response) {
    grpc::ClientContext context;
    return stub->Attend(&context, problem.request, response).error_code();
  };
  v1::AttendResponse response;
  EXPECT_EQ(attend(test::PlainWireProblem(seed, 64), &response), StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.Metric("attend_device_healthy{device=\"cpu\"}"), 0);
  EXPECT_EQ(server.Metric("attend_device_healthy{device=\"cpu1\"}"), 1);
  EXPECT_EQ(test::CheckHealth(server.Connect(), ""), test::Health::kServing);
  EXPECT_EQ(test::CheckHealth(server.Connect(), "attend.v1.AttentionService"),
            test::Health::kServing);
  for (int i = 0; i < 3; ++i) {
    WireProblem problem = test::PlainWireProblem(seed + static_cast<uint64_t>(i), 64);
    ASSERT_EQ(attend(problem, &response), StatusCode::OK);
    EXPECT_EQ(response.device(), "cpu1");
    EXPECT_EQ(test::Judge(problem, response), "");
  }
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub->GetServerInfo(&context, {}, &info).ok());
  ASSERT_EQ(info.devices_size(), 2);
  EXPECT_FALSE(info.devices(0).healthy());
  EXPECT_TRUE(info.devices(1).healthy());
  const auto probe = [&](const std::string& path) {
    return test::HttpGet(server.server().metrics_address(), path);
  };
  EXPECT_EQ(probe("/readyz") + probe("/healthz"), "ok\nok\n");
  const int64_t before = server.backend(1).submitted_items();
  server.backend(1).LoseDevice();
  EXPECT_EQ(attend(test::PlainWireProblem(seed, 64), &response), StatusCode::UNAVAILABLE);
  EXPECT_EQ(attend(test::PlainWireProblem(seed, 64), &response), StatusCode::UNAVAILABLE)
      << "none is left";
  EXPECT_EQ(server.backend(1).submitted_items(), before + 1);
  EXPECT_EQ(probe("/readyz") + probe("/healthz"), "not ready\nall devices are lost\n");
}

}  // namespace
}  // namespace attend
