// SPDX-License-Identifier: Apache-2.0
//
// A drain that gives up.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "tests/server/support/messages.h"
#include "tests/server/support/temporary_directory.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using test::TestServer;

// Its time passes only while a thread sleeps. `wait` is called before the first sleep.
class HastyClock final : public Clock {
 public:
  explicit HastyClock(std::function<void()> wait) : wait_(std::move(wait)) {}
  void Arm() { armed_ = true; }
  TimePoint Now() const override { return std::chrono::steady_clock::now() + passed_.load(); }
  void SleepFor(Duration duration) const override {
    if (!armed_) return std::this_thread::sleep_for(duration);
    if (passed_.load() == Duration::zero()) wait_();
    passed_ = passed_.load() + duration;
  }

 private:
  const std::function<void()> wait_;
  std::atomic<bool> armed_{false};
  mutable std::atomic<Duration> passed_{Duration::zero()};
};

// A request that cannot be stopped keeps the drain from finishing. The lines of other requests are
// batched for a moment before they are written, and the process is about to exit.
TEST(DrainTest, EndedRequestsAreLoggedBeforeADrainGivesUp) {
  const test::TemporaryDirectory directory;
  const std::filesystem::path log = directory.path() / "access.log";
  std::thread running, stopped;
  const auto clock = std::make_shared<HastyClock>([&] { stopped.join(); });
  TestServer server(
      [&](Config& config) {
        config.lanes = 1;
        config.access_log = log;
      },
      1, TestServer::Devices::kPlain, clock);
  server.backend().Hold();
  const auto ask = [&](const char* name, grpc::StatusCode expected) {
    v1::AttendRequest request = test::PlainWireProblem(0).request;
    request.set_request_id(name);
    grpc::ClientContext call;
    v1::AttendResponse response;
    EXPECT_EQ(server.Stub()->Attend(&call, request, &response).error_code(), expected) << name;
  };
  running = std::thread([&] { ask("running", grpc::StatusCode::OK); });
  server.backend().WaitForWaiting(1);
  stopped = std::thread([&] { ask("stopped", grpc::StatusCode::UNAVAILABLE); });
  server.WaitForQueued(1);
  clock->Arm();
  EXPECT_FALSE(server.server().Drain(Duration::zero()));
  const std::string lines = test::ReadFile(log);
  EXPECT_NE(lines.find("\"request_id\":\"stopped\""), std::string::npos) << lines;
  EXPECT_EQ(lines.find("\"request_id\":\"running\""), std::string::npos) << lines;
  server.backend().Release();
  running.join();
}

}  // namespace
}  // namespace attend
