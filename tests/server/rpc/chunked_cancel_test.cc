// SPDX-License-Identifier: Apache-2.0
//
// Cancellations that race with the first message of AttendChunked: the call must not end while the
// request that its header begins still refers to it. Freed memory is overwritten here, so that a
// use after free does not go unnoticed.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>  // defines __GLIBC__
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "server/engine/engine.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace attend {
namespace {

using test::ChunkedHeader;
using test::TestServer;

constexpr int kThreads = 4;
constexpr int kCallsEach = 3000;
constexpr int kPauseUsMost = 300;  // about as long as the server takes for a header

void SpoilFreedMemory() {
#if defined(__GLIBC__)
  mallopt(M_PERTURB, 0xa5);
#endif
}

TEST(ChunkedCancelTest, ACancellationThatRacesWithTheHeaderIsHarmless) {
  SpoilFreedMemory();
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const v1::AttendRequest header = ChunkedHeader(test::PlainWireProblem(1).request);
  const uint64_t seed = test::FreshSeed();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(t));
      const auto stub = server.Stub();
      v1::AttendChunkedRequest first;
      *first.mutable_header() = header;
      for (int i = 0; i < kCallsEach; ++i) {
        grpc::ClientContext context;
        const auto stream = stub->AttendChunked(&context);
        stream->Write(first);
        const auto until =
            std::chrono::steady_clock::now() + std::chrono::microseconds(random() % kPauseUsMost);
        while (std::chrono::steady_clock::now() < until) {
        }
        context.TryCancel();
        v1::AttendChunkedResponse granted;
        while (stream->Read(&granted)) {
        }
        EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED) << "seed " << seed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Engine& engine = server.server().engine();
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  // The server may hear of some calls only after their clients have given up.
  const auto at_rest = [&] {
    return engine.inflight() == 0 && engine.host_pool().used_bytes() == 0;
  };
  for (int times = 0; times < 20 && std::chrono::steady_clock::now() < until;) {
    times = at_rest() ? times + 1 : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(at_rest()) << "seed " << seed;
  // How many headers were still waiting then varies.
  EXPECT_LE(server.Metric("attend_early_cancellations_total"),
            server.Metric("attend_requests_total{code=\"CANCELLED\"}"))
      << "seed " << seed;
  const test::WireProblem problem = test::PlainWireProblem(2);
  EXPECT_TRUE(test::AttendOverStreams(server, problem.request, 2, 1000, seed).ok())
      << "seed " << seed;
}

// Blocks the thread that processes headers, which reads the clock.
class HeldClock final : public Clock {
 public:
  TimePoint Now() const override {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    while (held && std::string_view(name) == "attend-copy") {
      holds = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return SteadyClock().Now();
  }

  std::atomic<bool> held{false};
  mutable std::atomic<bool> holds{false};
};

TEST(ChunkedCancelTest, ACancellationWhileTheHeaderWaitsIsCountedAsEarly) {
  const auto clock = std::make_shared<HeldClock>();
  TestServer server(
      [](Config& config) {
        config.metrics_listen = "127.0.0.1:0";
        config.copy_threads = 1;
      },
      1, TestServer::Devices::kPlain, clock);
  const v1::AttendRequest header = ChunkedHeader(test::PlainWireProblem(1).request);
  test::ChunkedStreamClient taken(server, std::chrono::minutes(2));
  clock->held = true;
  EXPECT_TRUE(taken.SendHeader(header));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!clock->holds && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_TRUE(clock->holds);
  // the first ones may not have arrived yet
  for (int pause_ms = 1; pause_ms <= 512; pause_ms *= 2) {
    test::ChunkedStreamClient waiting(server);
    EXPECT_TRUE(waiting.SendHeader(header));
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    waiting.Cancel();
    EXPECT_EQ(waiting.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  clock->held = false;
  taken.Receive();
  taken.Cancel();
  EXPECT_EQ(taken.Finish().error_code(), grpc::StatusCode::CANCELLED);
  // The server may hear of the last one after the thread is free again.
  double early = 0, cancelled = 0;
  const auto counted = [&] { return early > 0 && cancelled > early && cancelled <= early + 2; };
  while (!counted() && std::chrono::steady_clock::now() < until) {
    early = server.Metric("attend_early_cancellations_total");
    cancelled = server.Metric("attend_requests_total{code=\"CANCELLED\"}");
  }
  EXPECT_TRUE(counted()) << cancelled << " cancelled, " << early << " of them early";
}

// The client's other streams may have brought its answer already: this is not a bad request.
TEST(ChunkedCancelTest, ACancellationBeforeTheHeaderIsNotARequest) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const auto stub = server.Stub();
  std::mt19937_64 random(test::FreshSeed());
  for (int i = 0; i < 300; ++i) {
    grpc::ClientContext context;
    const auto stream = stub->AttendChunked(&context);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % kPauseUsMost));
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  test::ChunkedStreamClient silent(server);
  silent.HalfClose();
  EXPECT_EQ(silent.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const std::string invalid = "attend_requests_total{code=\"INVALID_ARGUMENT\"}";
  while (server.Metric(invalid) < 1 && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_EQ(server.Metric(invalid), 1);
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"invalid\"}"), 1);
}

}  // namespace
}  // namespace attend
