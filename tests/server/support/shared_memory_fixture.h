// SPDX-License-Identifier: Apache-2.0
//
// A whole server with shared memory, and queries common to its tests.

#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "server/engine/engine.h"
#include "server/regions/region_registry.h"
#include "server/regions/shared_memory_server.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/region_client.h"
#include "tests/server/support/test_server.h"

namespace attend {

inline constexpr int64_t kRegionBytes = int64_t{8} << 20;

// A server with shared memory, its socket in a folder of its own.
class SharedMemoryTest : public ::testing::Test {
 protected:
  ~SharedMemoryTest() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start(const std::function<void(Config&)>& change = {}, int devices = 1) {
    std::string pattern = std::filesystem::temp_directory_path() / "attend-shm-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    server_ = std::make_unique<test::TestServer>(
        [&](Config& config) {
          config.shared_memory = true;
          config.shared_memory_socket = folder_ / "shm.sock";
          if (change) change(config);
        },
        devices);
    stub_ = server_->Stub();
  }
  std::string path() const { return server_->server().shared_memory()->socket_path(); }
  RegionRegistry::Stats stats() const {
    return server_->server().shared_memory()->registry().stats();
  }
  void WaitUntilEmpty() {
    Engine& engine = server_->server().engine();
    while (engine.inflight() > 0 || engine.host_pool().used_bytes() > 0) std::this_thread::yield();
    for (;;) {
      const RegionRegistry::Stats now = stats();
      if (now.bytes + now.changing_bytes + now.regions + now.clients + now.lent_regions == 0) {
        return;
      }
      std::this_thread::yield();
    }
  }

  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response) {
    grpc::ClientContext context;
    return stub_->Attend(&context, request, response);
  }
  void ExpectRefused(const v1::AttendRequest& request, grpc::StatusCode code,
                     const std::string& part) {
    v1::AttendResponse response;
    const grpc::Status status = Attend(request, &response);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_NE(status.error_message().find(part), std::string::npos) << status.error_message();
  }
  void ExpectServes() {
    test::WireProblem problem = test::PlainWireProblem(99);
    v1::AttendResponse response;
    ASSERT_TRUE(Attend(problem.request, &response).ok());
    EXPECT_EQ(test::Judge(problem, response), "");
  }
  // A plain problem in the region, including its answer.
  static test::WireProblem Shared(const test::MappedRegion& region, uint64_t seed) {
    test::WireProblem problem = test::PlainWireProblem(seed);
    const int64_t behind = test::PutTensors(region, 0, &problem.request);
    test::PlaceOutputs(region, behind, 4096, &problem.request);
    return problem;
  }

  std::filesystem::path folder_;
  std::unique_ptr<test::TestServer> server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
};

}  // namespace attend
