// SPDX-License-Identifier: Apache-2.0
//
// Lent memory whose client goes while it is used, events that are not reached yet, and servers that
// end meanwhile. Nothing may stay borrowed.

#include <future>

#include "tests/server/cuda_ipc_fixture.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::RegionClient;
using test::WireProblem;

TEST_F(CudaIpcTest, ARequestInFlightKeepsWhatWasLent) {
  for (const bool release : {false, true}) {
    SCOPED_TRACE(release);
    StartIpc();
    server_->backend().Hold();
    server_->backend().LendEvent("event");
    server_->backend().Reach("event");
    auto client = std::make_unique<RegionClient>(path());
    const auto region = Lend(*client, Allocate(65536), 0, "event");
    WireProblem problem = Shared(*region, 11);
    v1::AttendResponse response;
    auto call = std::async(std::launch::async, [&] { return Attend(problem.request, &response); });
    server_->backend().WaitForWaiting(1);
    if (release) {
      EXPECT_TRUE(client->Release(region->token()).has_released());
    } else {
      client.reset();
      while (stats().clients > 0) std::this_thread::yield();
    }
    EXPECT_EQ(borrowed(), 2) << "memory and event are held by the request";
    ExpectRefused(problem.request, StatusCode::NOT_FOUND, "of no region");
    server_->backend().Release();
    ASSERT_TRUE(call.get().ok());
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
    client.reset();
    WaitUntilEmpty();
    EXPECT_EQ(borrowed(), 0);
    ExpectServes();
    server_.reset();
    std::filesystem::remove_all(folder_);
  }
}

TEST_F(CudaIpcTest, WaitsForTheClientsEventAndOthersDoNot) {
  StartIpc([](Config& config) { config.lanes = 2; });
  RegionClient client(path());
  std::vector<std::future<grpc::Status>> calls;
  std::vector<std::unique_ptr<test::MappedRegion>> regions;
  std::vector<WireProblem> problems;
  std::vector<v1::AttendResponse> responses(3);
  for (const uint64_t n : {0, 1, 2}) {
    const std::string event = "event-" + std::to_string(n);
    server_->backend().LendEvent(event);
    regions.push_back(Lend(client, Allocate(65536), 0, event));
    problems.push_back(Shared(*regions.back(), n));
  }
  // What stands there before the event must not be computed.
  std::vector<std::string> inputs;
  for (const auto& region : regions) {
    inputs.emplace_back(region->data(), 3072);
    std::memset(region->data(), 0xff, 3072);  // NaN
  }
  for (size_t n = 0; n < 3; ++n) {
    calls.push_back(std::async(std::launch::async,
                               [&, n] { return Attend(problems[n].request, &responses[n]); }));
  }
  server_->backend().WaitForBatches(1);
  for (int i = 0; i < 5; ++i) ExpectServes();  // one lane is left to others
  for (size_t n = 0; n < 3; ++n) {
    EXPECT_NE(calls[n].wait_for(std::chrono::seconds(0)), std::future_status::ready);
  }
  for (size_t n = 0; n < 3; ++n) {
    inputs[n].copy(regions[n]->data(), inputs[n].size());
    server_->backend().Reach("event-" + std::to_string(n));
  }
  for (size_t n = 0; n < 3; ++n) {
    const grpc::Status status = calls[n].get();
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problems[n], test::WithBytes(*regions[n], responses[n])), "");
  }
}

// Q, K and V of their own events, and one region twice.
TEST_F(CudaIpcTest, ARequestWaitsForTheEventsOfAllItsRegions) {
  StartIpc();
  RegionClient client(path());
  server_->backend().LendEvent("a");
  server_->backend().LendEvent("b");
  const auto first = Lend(client, Allocate(65536), 0, "a");
  const auto second = Lend(client, Allocate(65536), 0, "b");
  WireProblem problem = Shared(*first, 12);
  WireProblem other = Shared(*second, 12);
  *problem.request.mutable_k() = other.request.k();
  v1::AttendResponse response;
  auto call = std::async(std::launch::async, [&] { return Attend(problem.request, &response); });
  server_->backend().WaitForBatches(1);
  server_->backend().Reach("a");
  EXPECT_NE(call.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  server_->backend().Reach("b");
  const grpc::Status status = call.get();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(test::Judge(problem, test::WithBytes(*first, response)), "");
}

TEST_F(CudaIpcTest, DrainingForgetsLoansAndFinishesWhatUsesThem) {
  StartIpc();
  server_->backend().Hold();
  RegionClient client(path());
  const auto region = Lend(client, Allocate(65536));
  WireProblem problem = Shared(*region, 13);
  v1::AttendResponse response;
  auto call = std::async(std::launch::async, [&] { return Attend(problem.request, &response); });
  server_->backend().WaitForWaiting(1);
  auto drained = std::async(std::launch::async,
                            [&] { return server_->server().Drain(std::chrono::seconds(60)); });
  EXPECT_FALSE(client.Receive().has_value()) << "the connection ends";
  server_->backend().Release();
  ASSERT_TRUE(call.get().ok());
  EXPECT_TRUE(drained.get());
  EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
  WaitUntilEmpty();
  EXPECT_EQ(borrowed(), 0);
}

TEST_F(CudaIpcTest, AnEndWithLoansOpen) {
  StartIpc();
  RegionClient client(path());
  const auto region = Lend(client, Allocate(65536));
  stub_.reset();
  server_.reset();  // the device asserts at its end that nothing is borrowed
  EXPECT_FALSE(client.Receive().has_value());
}

}  // namespace
}  // namespace attend
