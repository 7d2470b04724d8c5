// SPDX-License-Identifier: Apache-2.0
//
// Requests over shared memory whose client disconnects, tampers with it or gives up; regions named
// by other clients; and regions when the server drains or ends. Nothing may be left behind.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <future>

#include "tests/server/support/shared_memory_fixture.h"

namespace attend {
namespace {

namespace fs = std::filesystem;
using grpc::StatusCode;
using test::RegionClient;
using test::WireProblem;

// The client disconnects from the socket while its request is on a lane: the request ends well, the
// memory stays until then, and the client's remaining mapping is emptied afterwards.
TEST_F(SharedMemoryTest, ARequestInFlightKeepsItsRegion) {
  for (const bool release : {false, true}) {
    SCOPED_TRACE(release);
    Start();
    server_->backend().Hold();
    auto client = std::make_unique<RegionClient>(path());
    const auto region = client->Create(65536);
    WireProblem problem = Shared(*region, 11);
    v1::AttendResponse response;
    auto call = std::async(std::launch::async, [&] { return Attend(problem.request, &response); });
    server_->backend().WaitForWaiting(1);
    const RegionRegistry& registry = server_->server().shared_memory()->registry();
    RegionRef used = registry.Find(region->token(), 0);
    if (release) {
      EXPECT_TRUE(client->Release(region->token()).has_released());
    } else {
      client.reset();
      while (stats().clients > 0) std::this_thread::yield();
    }
    EXPECT_EQ(stats().regions, 0);
    EXPECT_EQ(stats().changing_bytes, 65536) << "held by the request";
    ExpectRefused(problem.request, StatusCode::NOT_FOUND, "names no region");
    server_->backend().Release();
    ASSERT_TRUE(call.get().ok());
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
    used.reset();
    client.reset();
    WaitUntilEmpty();
    EXPECT_EQ(std::count(region->data(), region->data() + region->bytes(), '\0'), region->bytes());
    ExpectServes();
    server_.reset();
    fs::remove_all(folder_);
  }
}

// Any connection that knows a token can use its region in a request; only the connection that
// created the region can release it. For tokens without a region see BadPlacesAreRefused.
TEST_F(SharedMemoryTest, AnotherClientsTokenServesRequestsButCannotRelease) {
  Start();
  auto owner = std::make_unique<RegionClient>(path());
  RegionClient second(path());
  const auto region = owner->Create(65536);
  const auto seconds = second.Create(65536);
  const auto second_stub = server_->Stub();
  const auto attend = [&](WireProblem& problem, v1::AttendResponse* response) {
    grpc::ClientContext context;
    return second_stub->Attend(&context, problem.request, response);
  };
  const auto expect_served = [&](const test::MappedRegion& in, uint64_t seed) {
    WireProblem problem = Shared(in, seed);
    v1::AttendResponse response;
    const grpc::Status status = attend(problem, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problem, test::WithBytes(in, response)), "");
  };
  expect_served(*region, 17);
  const v1::RegionReply reply = second.Release(region->token());
  EXPECT_EQ(reply.error().code(), static_cast<int>(Code::kNotFound));
  EXPECT_EQ(stats().regions, 2);
  expect_served(*region, 18);  // another seed: not the previous answer
  WireProblem orphaned = Shared(*region, 19);
  owner.reset();
  while (stats().clients > 1) std::this_thread::yield();
  v1::AttendResponse response;
  const grpc::Status status = attend(orphaned, &response);
  EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_NE(status.error_message().find("its connection has ended"), std::string::npos)
      << status.error_message();
  expect_served(*seconds, 20);  // its own region stays
  second.Close();
  WaitUntilEmpty();
}

// Everything that a client can do to its side: unmap, try to truncate, punch holes, overwrite
// during a request.
TEST_F(SharedMemoryTest, AClientThatTampersWithItsRegionHarmsOnlyItself) {
  Start([](Config& config) { config.reference_check = "all"; });
  RegionClient client(path());
  const auto region = client.Create(kRegionBytes);
  WireProblem problem = test::PlainWireProblem(12, 512, 64);
  const int64_t behind = test::PutTensors(*region, 0, &problem.request);
  test::PlaceOutputs(*region, behind, 1 << 20, &problem.request);
  EXPECT_NE(ftruncate(region->file(), 0), 0);
  EXPECT_EQ(errno, EPERM);
  server_->backend().Hold();
  v1::AttendResponse response;
  auto call = std::async(std::launch::async, [&] { return Attend(problem.request, &response); });
  server_->backend().WaitForWaiting(1);
  EXPECT_EQ(fallocate(region->file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, behind / 2),
            0);
  std::memset(region->data(), 0xff, static_cast<size_t>(behind));  // NaN
  region->Unmap();
  server_->backend().Release();
  const grpc::Status status = call.get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  client.Close();
  WaitUntilEmpty();
  ExpectServes();
}

TEST_F(SharedMemoryTest, CancelledAndExpiredRequestsReleaseTheirRegions) {
  Start([](Config& config) { config.lanes = 1; });
  server_->backend().Hold();
  RegionClient client(path());
  const auto region = client.Create(65536), other = client.Create(65536);
  const WireProblem running = Shared(*region, 13), queued = Shared(*other, 13);
  grpc::ClientContext cancelled;
  v1::AttendResponse response, response2, response3;
  auto first = std::async(std::launch::async, [&] { return Attend(running.request, &response); });
  server_->backend().WaitForWaiting(1);
  auto second = std::async(std::launch::async,
                           [&] { return stub_->Attend(&cancelled, queued.request, &response2); });
  server_->WaitForQueued(1);
  cancelled.TryCancel();
  EXPECT_EQ(second.get().error_code(), StatusCode::CANCELLED);
  grpc::ClientContext late;
  late.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
  EXPECT_EQ(stub_->Attend(&late, queued.request, &response3).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  ASSERT_TRUE(client.Release(other->token()).has_released());
  while (stats().changing_bytes > 0) std::this_thread::yield();
  server_->backend().Release();
  EXPECT_TRUE(first.get().ok());
  client.Close();
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, DrainingReleasesRegionsAndFinishesTheirRequests) {
  Start();
  server_->backend().Hold();
  RegionClient client(path());
  const std::string socket = path();
  const auto region = client.Create(65536);
  WireProblem problem = Shared(*region, 14);
  v1::AttendResponse response;
  auto call = std::async(std::launch::async, [&] { return Attend(problem.request, &response); });
  server_->backend().WaitForWaiting(1);
  auto drained = std::async(std::launch::async,
                            [&] { return server_->server().Drain(std::chrono::seconds(60)); });
  EXPECT_FALSE(client.Receive().has_value()) << "the connection ends";
  while (fs::exists(socket)) std::this_thread::yield();
  ExpectRefused(problem.request, StatusCode::UNAVAILABLE, "draining");
  server_->backend().Release();
  ASSERT_TRUE(call.get().ok());
  EXPECT_TRUE(drained.get());
  EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, AFailedChecksDumpHasTheRegionsBytes) {
  Start([this](Config& config) { config.check_dump_dir = folder_ / "dumps"; });
  server_->backend().Corrupt([](const Attention& a) { static_cast<float*>(a.o.data)[3] += 10; });
  RegionClient client(path());
  const auto region = client.Create(65536);
  WireProblem problem = test::PlainWireProblem(15);
  const v1::AttendRequest whole = problem.request;
  const int64_t behind = test::PutTensors(*region, 0, &problem.request);
  test::PlaceOutputs(*region, behind, 4096, &problem.request);
  problem.request.set_check(true);
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(problem.request, &response).ok());
  EXPECT_FALSE(response.check().ok());
  ASSERT_FALSE(fs::is_empty(folder_ / "dumps"));
  const fs::path dump = fs::directory_iterator(folder_ / "dumps")->path();
  v1::AttendRequest request;
  v1::AttendResponse wrong;
  std::ifstream request_file(dump / "request.binpb", std::ios::binary);
  std::ifstream response_file(dump / "response.binpb", std::ios::binary);
  ASSERT_TRUE(request.ParseFromIstream(&request_file));
  ASSERT_TRUE(wrong.ParseFromIstream(&response_file));
  EXPECT_TRUE(request.q().has_inline_bytes());
  EXPECT_FALSE(request.has_o_placement());
  ASSERT_EQ(request.raw_size(), 3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(request.raw(i) == whole.raw(i));
  EXPECT_TRUE(wrong.o().has_inline_bytes());
  EXPECT_TRUE(wrong.lse().has_inline_bytes());
  ASSERT_EQ(wrong.raw_size(), 2);
  const v1::AttendResponse answer = test::WithBytes(*region, response);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(wrong.raw(i) == answer.raw(i));
  server_->backend().Corrupt({});
  v1::AttendResponse again;
  ASSERT_TRUE(Attend(request, &again).ok());
  EXPECT_TRUE(again.check().ok()) << "it can be sent as it is";
}

TEST_F(SharedMemoryTest, TheServersEndReleasesOpenRegions) {
  Start();
  RegionClient client(path());
  const auto region = client.Create(65536);
  WireProblem problem = Shared(*region, 16);
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(problem.request, &response).ok());
  stub_.reset();
  server_.reset();  // the backend's owner asserts at its end that all memory was released
  EXPECT_FALSE(client.Receive().has_value());
  EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
}

}  // namespace
}  // namespace attend
