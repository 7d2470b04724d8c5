// SPDX-License-Identifier: Apache-2.0
//
// Heap allocations of a small call over the server's own transport, on the server's threads. The
// sanitizer reports each allocation.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sanitizer/allocator_interface.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "attend/v1/attention.grpc.pb.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/app/server.h"
#include "server/log/logging.h"
#include "tests/server/support/messages.h"

namespace attend {
namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

bool OnServersThread() {
  thread_local const bool is = [] {
    char name[16] = {};
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
           std::string_view(name).starts_with("attend-");
  }();
  return is;
}

void OnAllocation(const volatile void*, size_t) {
  if (counting.load(std::memory_order_relaxed) && OnServersThread()) allocations.fetch_add(1);
}

class AllocationsTest : public testing::Test {
 protected:
  static constexpr int kCallers = 16;
  static constexpr int kCalls = 100;  // of each

  static void SetUpTestSuite() {
    ASSERT_NE(__sanitizer_install_malloc_and_free_hooks(OnAllocation, [](const volatile void*) {}),
              0);
  }

  void SetUp() override {
    Config config;
    config.listen = {"127.0.0.1:0"};
    config.metrics_listen = "off";
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(MakeCpuBackend(BackendOptions{}));
    auto logger = MakeLogger({});
    ASSERT_TRUE(logger.ok());
    auto server = Server::Start(config, std::move(backends), std::move(*logger));
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(*server);
    channel_ =
        grpc::CreateChannel(server_->addresses().front(), grpc::InsecureChannelCredentials());
  }

  // Allocations per call, with this many callers at once that make kCalls calls each, after a
  // warm-up.
  double OfACall(int callers) {
    AllCall(callers);
    allocations = 0;
    counting = true;
    AllCall(callers);
    counting = false;
    return static_cast<double>(allocations.load()) / (callers * kCalls);
  }
  // The same for messages on one stream, with this many in flight.
  double OfAMessage(int in_flight) {
    grpc::ClientContext context;
    const auto stream = v1::AttentionService::NewStub(channel_)->AttendStream(&context);
    v1::AttendResponse answer;
    int64_t measured = 0;
    const int64_t all = int64_t{2} * kCalls * kCallers;
    for (int64_t written = 0, read = 0; read < all; ++read) {
      for (; written < all && written - read < in_flight; ++written) {
        EXPECT_TRUE(stream->Write(problem_.request));
      }
      if (!stream->Read(&answer) || answer.has_status()) return -1;
      if (read == all / 2) {
        allocations = 0;
        counting = true;
      }
      measured += counting ? 1 : 0;
    }
    counting = false;
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
    return static_cast<double>(allocations.load()) / static_cast<double>(measured);
  }

 private:
  void AllCall(int callers) {
    std::vector<std::thread> threads;
    for (int i = 0; i < callers; ++i) {
      threads.emplace_back([this] {
        const auto stub = v1::AttentionService::NewStub(channel_);
        for (int call = 0; call < kCalls; ++call) {
          grpc::ClientContext context;
          v1::AttendResponse answer;
          const grpc::Status status = stub->Attend(&context, problem_.request, &answer);
          EXPECT_TRUE(status.ok()) << status.error_message();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const test::WireProblem problem_ = test::PlainWireProblem(/*seed=*/1, /*length=*/16, /*dim=*/64);
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(AllocationsTest, ASmallCallMakesFewAllocations) {
  const double beside_others = OfACall(kCallers);
  const double alone = OfACall(1);
  RecordProperty("beside_others", std::to_string(beside_others));
  RecordProperty("alone", std::to_string(alone));
  EXPECT_GT(beside_others, 0) << "the sanitizer told of none";
  EXPECT_LE(beside_others, 12);
  EXPECT_LE(alone, 18);
}

TEST_F(AllocationsTest, AStreamsMessageMakesFewAllocations) {
  const double of_a_message = OfAMessage(kCallers);
  RecordProperty("of_a_message", std::to_string(of_a_message));
  EXPECT_GT(of_a_message, 0) << "the sanitizer told of none";
  EXPECT_LE(of_a_message, 12);
}

}  // namespace
}  // namespace attend
