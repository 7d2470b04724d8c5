// SPDX-License-Identifier: Apache-2.0
//
// Lent memory whose client leaves during a request, events that are not reached yet, devices that
// do not release memory, and servers that end meanwhile. No import may be left open.

#include <spdlog/sinks/null_sink.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <string_view>
#include <vector>

#include "server/regions/device_importer.h"
#include "server/regions/region_memory.h"
#include "server/regions/region_registry.h"
#include "server/regions/region_socket.h"
#include "server/regions/shared_memory_server.h"
#include "server/util/random_token.h"
#include "tests/server/support/cuda_ipc_fixture.h"
#include "tests/server/support/fake_backend.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::RegionClient;
using test::WireProblem;

TEST_F(CudaIpcTest, ARequestInFlightKeepsItsImports) {
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
      v1::RegionRequest request;
      request.mutable_release()->set_token(region->token());
      ASSERT_TRUE(client->Send(request.SerializeAsString()));
      while (server_->server().shared_memory()->registry().Find(region->token(), 0) != nullptr)
        std::this_thread::yield();
    } else {
      client.reset();
      while (stats().clients > 0) std::this_thread::yield();
    }
    EXPECT_EQ(imported(), 2) << "memory and event are held by the request";
    ExpectRefused(problem.request, StatusCode::NOT_FOUND, "names no region");
    server_->backend().Release();
    if (release) {
      const auto reply = client->Receive();
      EXPECT_TRUE(reply && reply->has_released());
      EXPECT_EQ(imported(), 0) << "the reply says that it is closed";
    }
    ASSERT_TRUE(call.get().ok());
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
    client.reset();
    WaitUntilEmpty();
    EXPECT_EQ(imported(), 0);
    ExpectServes();
    server_.reset();
    std::filesystem::remove_all(folder_);
  }
}

TEST_F(CudaIpcTest, OnlyARequestOverTheImportWaitsForItsEvent) {
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
  // The memory's contents before the event must not be computed.
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

// Q, K and V with an event each, and one region used twice.
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

// A device that closes imports only when the test allows it; it computes nothing.
class HeldDevice final : public Backend {
 public:
  HeldDevice() { info_.uuid = test::TestServer::DeviceUuid(0); }
  ~HeldDevice() override { EXPECT_EQ(imported_, 0); }
  const DeviceInfo& info() const override { return info_; }
  HostAllocator& host_allocator() override { return host_.host_allocator(); }
  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions&) override {
    return Unimplemented("it computes nothing");
  }
  Result<ImportedMemory> ImportMemory(std::string_view) override {
    const std::lock_guard lock(mutex_);
    ++imported_;
    return ImportedMemory{block_.data(), static_cast<int64_t>(block_.size())};
  }
  void ReleaseMemory(char*) override {
    std::unique_lock lock(mutex_);
    returning_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !held_; });
    --imported_;
  }
  void WaitUntilReturning() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return returning_; });
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  v1::ImportCudaMemory ImportOf() const {
    v1::ImportCudaMemory lent;
    lent.set_device_uuid(info_.uuid);
    lent.set_bytes(block_.size());
    return lent;
  }

 private:
  test::FakeBackend host_;
  DeviceInfo info_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> block_ = std::vector<char>(4096);
  bool held_ = true;
  bool returning_ = false;
  int imported_ = 0;
};

// Only the releasing client waits, however long the device takes.
TEST(LentMemoryHeldTest, ASlowReleaseDoesNotDelayOtherClients) {
  std::string pattern = std::filesystem::temp_directory_path() / "attend-held-XXXXXX";
  const std::filesystem::path folder = mkdtemp(pattern.data());
  {
    HeldDevice device;
    const DeviceImporter importer(std::vector<Backend*>{&device});
    MemfdMemory memory(device.host_allocator());
    RegionLimits limits{{1}, 1 << 20, 1 << 19, 2};
    limits.return_wait = Duration::zero();
    const SteadyClock clock;
    RegionRegistry registry(limits, memory, clock, RandomToken, &importer);
    Logger logger({}, std::make_shared<spdlog::sinks::null_sink_mt>());
    RegionSocket::Options options{.path = {}, .tenant_weights = {1}};
    options.path = folder / "shm.sock";
    const auto socket = RegionSocket::Start(options, registry, logger, clock);
    ASSERT_TRUE(socket.ok()) << socket.status().ToString();
    RegionClient stuck(options.path), gone(options.path), other(options.path);
    const auto release = [](RegionClient& client, const std::string& token) {
      v1::RegionRequest request;
      request.mutable_release()->set_token(token);
      return client.Send(request.SerializeAsString());
    };
    ASSERT_TRUE(release(stuck, stuck.Import(device.ImportOf()).imported().token()));
    device.WaitUntilReturning();
    ASSERT_TRUE(release(gone, gone.Import(device.ImportOf()).imported().token()));
    gone.Close();
    for (int i = 0; i < 3; ++i) {
      // Releases from now on queue behind the stuck one. With two of them the client's bound is
      // reached, and Create reports that instead of waiting.
      const v1::RegionReply made = other.TryCreate(4096);
      EXPECT_EQ(made.has_created(), i < 2) << made.ShortDebugString();
      if (i < 2) {
        EXPECT_TRUE(other.Release(made.created().token()).has_released());
      }
    }
    // a client that waits may disconnect
    while (registry.stats().clients != 2) std::this_thread::yield();
    device.Release();
    const auto reply = stuck.Receive();
    EXPECT_TRUE(reply && reply->has_released());
    EXPECT_TRUE(stuck.TryCreate(4096).has_created()) << "it is served as before";
    while (registry.stats().lent_regions > 0) std::this_thread::yield();
  }
  std::filesystem::remove_all(folder);
}

TEST_F(CudaIpcTest, TheServersEndClosesAllImports) {
  StartIpc();
  RegionClient client(path());
  const auto region = Lend(client, Allocate(65536));
  stub_.reset();
  server_.reset();  // the device asserts on destruction that nothing is imported
  EXPECT_FALSE(client.Receive().has_value());
}

}  // namespace
}  // namespace attend
