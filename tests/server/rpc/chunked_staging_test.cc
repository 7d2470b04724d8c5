// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked on devices whose staging the test controls: answers are the same as without
// staging, failed copies are invisible to clients, and failed uploads leave nothing behind.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/engine.h"
#include "server/upload/staging.h"
#include "tests/server/support/await.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/session_calls.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using std::chrono::milliseconds;
using test::ChunkedHeader;
using test::ChunkedStreamClient;
using test::FakeStream;
using test::TestServer;
using test::WireProblem;

std::unique_ptr<TestServer> StagingServer(int devices = 1,
                                          const std::function<void(Config&)>& change = {}) {
  return std::make_unique<TestServer>(
      [&](Config& config) {
        config.staging_min_bytes = 1;
        config.log_level = "off";
        config.copy_threads = 2;
        if (change) change(config);
      },
      devices, TestServer::Devices::kStaging);
}

const StagingBudget& Budget(TestServer& server) { return server.server().engine().staging(); }

void AwaitNothingHeld(TestServer& server, int devices = 1) {
  Engine& engine = server.server().engine();
  test::Await("nothing is in flight and no memory is in use",
              [&] { return engine.inflight() == 0 && engine.host_pool().used_bytes() == 0; });
  for (int i = 0; i < devices; ++i) {
    test::Await("nothing is held for device " + std::to_string(i),
                [&] { return Budget(server).held_bytes(i) == 0; });
    EXPECT_EQ(server.backend(i).staging().counts().device_bytes, 0);
  }
}

int64_t TensorBytes(const v1::AttendRequest& request) {
  int64_t bytes = 0;
  for (const std::string& raw : request.raw()) bytes += static_cast<int64_t>(raw.size());
  return bytes;
}

TEST(ChunkedStagingTest, EveryFeatureIsAnsweredOverAnyNumberOfStreams) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto server = StagingServer(2);
  for (const int i : {0, 1}) server->backend(i).MoveSpans();
  int staged = 0;
  const int rounds = std::max(20, static_cast<int>(60 * test::TestScale()));
  for (int i = 0; i < rounds; ++i) {
    SCOPED_TRACE(i);
    WireProblem problem = test::RandomWireProblem(seed + static_cast<uint64_t>(i), 3e4);
    if (i % 4 == 0) problem.request.set_check(true);
    if (TensorBytes(problem.request) > 0) ++staged;
    const test::ChunkedOutcome outcome =
        test::AttendOverStreams(*server, problem.request, 1 + i % 4, 3000, seed);
    ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
    EXPECT_EQ(test::Judge(problem, outcome.response), "");
    if (i % 4 == 0) {
      EXPECT_TRUE(outcome.response.check().ok()) << outcome.response.check().detail();
    }
  }
  EXPECT_GT(staged, 0);
  EXPECT_EQ(Budget(*server).ends(StagingEnd::kUsed), staged);
  AwaitNothingHeld(*server, 2);
}

// Rows to be appended to a session go to the device as they arrive, and from there to its pages. If
// the copy fails or bytes are missing, all rows are appended or none.
TEST(ChunkedStagingTest, AppendsAllRowsToSessionsOrNone) {
  const auto server =
      StagingServer(1, [](Config& config) { config.session_memory_bytes = int64_t{32} << 20; });
  server->backend().MoveSpans();
  test::SessionCalls calls(*server);
  v1::CreateSessionRequest create;
  v1::LayerShape* const shape = create.add_shapes();
  shape->set_dtype(v1::DTYPE_FLOAT32);
  shape->set_heads_kv(2);
  shape->set_dim(16);
  std::mt19937_64 random(test::FreshSeed());
  enum { kWell, kCopyFails, kAbandoned };
  for (const int what : {kWell, kCopyFails, kAbandoned}) {
    v1::Session session;
    ASSERT_TRUE(calls.Create(create, session).ok());
    WireProblem problem = test::PlainWireProblem(random(), 150);
    problem.request.set_check(true);
    problem.request.add_sessions()->set_session(session.id());
    if (what == kAbandoned) {
      EXPECT_EQ(calls.AbandonChunks(problem.request, random).error_code(), StatusCode::CANCELLED);
    } else {
      if (what == kCopyFails) server->backend().staging().FailCopy(1, Internal("planned"));
      const test::ChunkedOutcome outcome =
          test::AttendOverStreams(*server, problem.request, 2, 3000, random());
      ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
      EXPECT_EQ(test::Judge(problem, outcome.response), "");
      EXPECT_TRUE(outcome.response.check().ok()) << outcome.response.check().detail();
    }
    AwaitNothingHeld(*server);
    ASSERT_TRUE(calls.Get(session.id(), session).ok());
    EXPECT_EQ(session.length(), what == kAbandoned ? 0 : 150);
  }
  EXPECT_EQ(Budget(*server).ends(StagingEnd::kUsed), 1);
  EXPECT_EQ(Budget(*server).ends(StagingEnd::kCopyFailed), 1);
  EXPECT_EQ(Budget(*server).ends(StagingEnd::kAborted), 1);
}

TEST(ChunkedStagingTest, TheSettingDisablesStaging) {
  const auto off = StagingServer(1, [](Config& config) { config.staging_max_bytes = 0; });
  const auto small =
      StagingServer(1, [](Config& config) { config.staging_min_bytes = int64_t{4} << 20; });
  for (TestServer* server : {off.get(), small.get()}) {
    WireProblem problem = test::PlainWireProblem(1, 30);
    const test::ChunkedOutcome outcome =
        test::AttendOverStreams(*server, problem.request, 2, 900, 1);
    ASSERT_TRUE(outcome.ok());
    EXPECT_EQ(test::Judge(problem, outcome.response), "");
    EXPECT_EQ(server->backend().staging().counts().makes, 0);
    v1::GetServerInfoResponse info;
    grpc::ClientContext context;
    ASSERT_TRUE(server->Stub()->GetServerInfo(&context, {}, &info).ok());
    // The fake device has 1 GiB, a quarter of which may be used for staging.
    EXPECT_EQ(info.devices(0).staging_bytes_max(), server == off.get() ? 0 : int64_t{256} << 20);
  }
}

TEST(ChunkedStagingTest, MetricsCountUploadsByOutcome) {
  const auto server =
      StagingServer(1, [](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  EXPECT_EQ(server->Metric("attend_staged_uploads_total{end=\"used\"}"), 0);
  EXPECT_EQ(server->Metric("attend_staging_memory_limit_bytes{device=\"cpu\"}"), 256.0 * (1 << 20));
  WireProblem problem = test::PlainWireProblem(1, 40);
  server->backend().staging().FailCopy(2, Internal("copying an upload"));  // of the second upload
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(test::AttendOverStreams(*server, problem.request, 1, 900, 1).ok());
  }
  EXPECT_EQ(server->Metric("attend_staged_uploads_total{end=\"used\"}"), 1);
  EXPECT_EQ(server->Metric("attend_staged_uploads_total{end=\"copy_failed\"}"), 1);
  EXPECT_EQ(server->Metric("attend_staged_bytes_total"),
            static_cast<double>(TensorBytes(problem.request)));
  AwaitNothingHeld(*server);
  EXPECT_EQ(server->Metric("attend_staging_memory_bytes{device=\"cpu\"}"), 0);
}

// The client hears of the end at once; the memory is free after the last copy.
TEST(ChunkedStagingTest, ACancelledUploadKeepsItsMemoryUntilItsCopiesEnd) {
  const auto server = StagingServer();
  HostPool& pool = server->server().engine().host_pool();
  // Longer than a piece, so that copies begin.
  const WireProblem problem = test::PlainWireProblem(3, 6000, 64);
  server->backend().staging().Hold();
  for (const bool cancel : {true, false}) {
    ChunkedStreamClient client(*server, test::kWaitMost);
    ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
    ASSERT_TRUE(client.Receive().has_grant());
    ASSERT_TRUE(client.SendChunk(1, 0, problem.request.raw(0)));
    ASSERT_TRUE(client.SendChunk(2, 0, problem.request.raw(1)));
    if (cancel) {
      client.Cancel();
      EXPECT_EQ(client.Finish().error_code(), StatusCode::CANCELLED);
    } else {
      ASSERT_TRUE(client.SendChunk(2, 5, "overlap"));
      EXPECT_EQ(client.Finish().error_code(), StatusCode::INVALID_ARGUMENT);
    }
    test::Await("the upload is aborted",
                [&] { return Budget(*server).ends(StagingEnd::kAborted) >= (cancel ? 1 : 2); });
    EXPECT_GT(Budget(*server).held_bytes(0), 0);
    EXPECT_GT(pool.used_bytes(), 0) << "a copy still reads it";
  }
  // At least the second one: the first may have been cancelled before its chunks were read.
  EXPECT_GT(server->backend().staging().counts().copies, 0);
  server->backend().staging().Release();
  AwaitNothingHeld(*server);
}

// One upload that succeeds, or stops somewhere for some reason.
void RandomUpload(TestServer& server, uint64_t seed, std::atomic<int>& good) {
  std::mt19937_64 random(seed);
  WireProblem problem = test::RandomWireProblem(seed, 1e4);
  if (random() % 3 == 0) {
    const test::ChunkedOutcome outcome = test::AttendOverStreams(
        server, problem.request, 1 + static_cast<int>(random() % 3), 2000, seed);
    EXPECT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
    EXPECT_EQ(test::Judge(problem, outcome.response), "");
    ++good;
    return;
  }
  ChunkedStreamClient client(server, milliseconds(30000));
  client.SendHeader(ChunkedHeader(problem.request));
  v1::AttendChunkedResponse grant;
  if (!client.Receive(&grant)) return;
  const std::vector<test::Chunk> chunks = test::CutToChunks(problem.request, 2000, random);
  const size_t stop = random() % (chunks.size() + 1);
  for (size_t c = 0; c < stop; ++c) {
    client.SendChunk(chunks[c].tensor, chunks[c].offset, chunks[c].data);
  }
  if (random() % 2 == 0) client.Cancel();
  client.HalfClose();
  client.Finish();
}

TEST(ChunkedStagingTest, RandomUploadsLeaveNothingBehind) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto server = StagingServer(2, [](Config& config) {
    config.staging_max_bytes = 30'000;  // not for all of them
  });
  std::atomic<int> good{0}, ended{0};
  constexpr int kClients = 4;
  const int rounds = std::max(8, static_cast<int>(30 * test::TestScale()));
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < rounds; ++i) {
        RandomUpload(*server, seed + static_cast<uint64_t>(1000 * c + i), good);
      }
      ++ended;
    });
  }
  std::mt19937_64 random(seed);
  test::Await("all clients have ended", [&] {
    FakeStream& stream = server->backend(static_cast<int>(random() % 2)).staging();
    const int n = static_cast<int>(1 + random() % 4);
    switch (random() % 5) {
      case 0:
        stream.FailMake(n, ResourceExhausted("cudaErrorPretend"));
        break;
      case 1:
        stream.FailCopy(n, Internal("cudaErrorPretend"));
        break;
      case 2:
        stream.FailFinish(n, Internal("cudaErrorPretend"));
        break;
      case 3:
        stream.Hold();
        break;
      default:
        stream.Release();
    }
    return ended == kClients;
  });
  for (const int i : {0, 1}) server->backend(i).staging().Release();
  for (std::thread& client : clients) client.join();
  EXPECT_GT(good, 0);
  AwaitNothingHeld(*server, 2);
}

}  // namespace
}  // namespace attend
