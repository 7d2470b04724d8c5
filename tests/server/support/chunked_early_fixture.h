// SPDX-License-Identifier: Apache-2.0
//
// Uploads whose heads are computed while others' bytes are to come: a problem that costs next to
// nothing and is checked by every byte, a server whose device computes it head by head, and streams
// that are admitted and wait for their chunks.

#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "server/upload/staging.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend::test {

// A head of each tensor is exactly one of the pieces that a staging copies.
inline constexpr int64_t kRows = 4096;
inline constexpr int64_t kDim = 64;
inline constexpr int64_t kHeadBytes = kRows * kDim * 4;
static_assert(kHeadBytes == StagingOptions{}.piece_bytes);

// Every KV head of every sequence is a part of its own.
inline std::vector<AttentionSlice> HeadByHead(const Attention& a) {
  const Problem& p = a.problem;
  std::vector<AttentionSlice> parts;
  // Others' requests are small: computed as one.
  if (p.packed || p.len_q == 0 || ElementsQ(p) <= 256) return parts;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_kv; ++h) parts.push_back({b, b + 1, h, h + 1, 0, p.len_q});
  }
  return parts;
}

// Costs next to nothing, and no byte of Q, K or V could be another one unnoticed. Of one sequence,
// Q, K and V of one shape, rows that follow each other.
inline void Mix(const Attention& a) {
  const Problem& p = a.problem;
  const auto head = [](const auto& view, int64_t n) {
    return static_cast<const unsigned char*>(view.data) + n * view.stride_h * 4;
  };
  for (int64_t h = 0; h < p.heads_q; ++h) {
    const unsigned char* const q = head(a.q, h);
    const unsigned char* const k = head(a.k, h / p.group());
    const unsigned char* const v = head(a.v, h / p.group());
    auto* const o = const_cast<unsigned char*>(head(a.o, h));
    for (int64_t i = 0; i < p.len_q * p.dim * 4; ++i) o[i] = q[i] ^ k[i] ^ v[i];
    for (int64_t row = 0; row < p.len_q; ++row) {
      std::memcpy(a.lse + h * a.lse_stride_h + row, q + row * p.dim * 4, 4);
    }
  }
}

// What Mix makes of it.
struct LargeProblem {
  v1::AttendRequest request;
  std::string o, lse;

  explicit LargeProblem(int64_t heads_kv, int64_t group = 1) {
    const ProblemSpec spec = MakeSpec(1, heads_kv * group, heads_kv, kRows, kRows, kDim, kDim);
    const OwnedAttention owned = MakeAttention(spec, 1);
    request = ToRequest(spec, owned);
    const Attention& a = owned.attention;
    Mix(a);
    o.assign(static_cast<const char*>(a.o.data), static_cast<size_t>(BytesO(a.problem)));
    lse.assign(reinterpret_cast<const char*>(a.lse), static_cast<size_t>(BytesLse(a.problem)));
  }
};

// Without the bytes, which are millions.
inline void ExpectRight(const LargeProblem& problem, const v1::AttendResponse& response) {
  ASSERT_EQ(response.raw_size(), 2);
  EXPECT_TRUE(response.raw(0) == problem.o) << "O";
  EXPECT_TRUE(response.raw(1) == problem.lse) << "LSE";
}

inline std::unique_ptr<TestServer> PartsServer(
    const std::function<void(Config&)>& change = {}, int devices = 1,
    std::shared_ptr<const Clock> clock = std::make_shared<SteadyClock>()) {
  auto server = std::make_unique<TestServer>(
      [&](Config& config) {
        config.staging_min_bytes = 1;
        config.log_level = "off";
        config.copy_threads = 2;
        config.lanes = 2;  // so many parts of one upload are open at once
        if (change) change(config);
      },
      devices, TestServer::Devices::kStaging, TestServer::kAnywhere, std::move(clock));
  for (int i = 0; i < devices; ++i) {
    server->backend(i).MoveSpans();
    server->backend(i).SetParts(HeadByHead);
  }
  return server;
}

inline const StagingBudget& Budget(TestServer& server) {
  return server.server().engine().staging();
}

inline void AwaitNothingHeld(TestServer& server, int devices = 1) {
  Engine& engine = server.server().engine();
  while (engine.inflight() > 0 || engine.host_pool().used_bytes() > 0) std::this_thread::yield();
  for (int i = 0; i < devices; ++i) {
    while (Budget(server).held_bytes(i) > 0) std::this_thread::yield();
    EXPECT_EQ(server.backend(i).staging().counts().device_bytes, 0);
  }
}

// A small request of somebody else, which takes one lane until the device's gate opens.
class Blocker {
 public:
  explicit Blocker(TestServer& server)
      : code_(std::async(std::launch::async, [stub = server.Stub()] {
          grpc::ClientContext context;
          v1::AttendResponse response;
          return stub->Attend(&context, PlainWireProblem(1).request, &response).error_code();
        })) {}
  ~Blocker() { EXPECT_EQ(code_.get(), grpc::StatusCode::OK); }

 private:
  std::future<grpc::StatusCode> code_;
};

// A large request over some streams, admitted and joined. Nothing of it, nor of anything else, may
// be left on the server at the end.
struct Upload {
  // To a server of its own.
  Upload(int64_t heads, size_t count, const std::function<void(Config&)>& change = {})
      : Upload(PartsServer(change), std::make_shared<const LargeProblem>(heads), count) {}
  // `timeout`: of all streams; 0: none.
  Upload(std::shared_ptr<TestServer> to, std::shared_ptr<const LargeProblem> large, size_t count,
         std::chrono::milliseconds timeout = std::chrono::milliseconds(0))
      : server(std::move(to)), device(server->backend()), problem(std::move(large)) {
    device.SetCompute(Mix);
    streams.push_back(std::make_unique<ChunkedStreamClient>(*server, timeout));
    EXPECT_TRUE(streams[0]->SendHeader(ChunkedHeader(problem->request)));
    const std::string token = streams[0]->Receive().grant().token();
    while (streams.size() < count) {
      streams.push_back(std::make_unique<ChunkedStreamClient>(*server, timeout));
      EXPECT_TRUE(streams.back()->SendToken(token));
      EXPECT_TRUE(streams.back()->Receive().has_grant());
    }
  }
  ~Upload() {
    streams.clear();
    device.Release();
    blocker.reset();
    AwaitNothingHeld(*server);
  }

  // The head's Q, K and V, in turn by all streams; false if one of them has ended.
  bool TrySendHead(size_t head) {
    const auto bytes = static_cast<size_t>(kHeadBytes);
    bool sent = true;
    for (int i = 0; i < 3; ++i) {
      sent &= streams[static_cast<size_t>(i) % streams.size()]->SendChunk(
          i + 1, head * bytes, problem->request.raw(i).substr(head * bytes, bytes));
    }
    return sent;
  }
  void SendHead(size_t head) { EXPECT_TRUE(TrySendHead(head)) << "head " << head; }
  void BlockALane() {
    device.Hold();
    blocker = std::make_unique<Blocker>(*server);
    device.WaitForWaiting(1);
  }
  // Of two lanes one has a blocker at the device's gate, the other the first head's part. The
  // second's is in the queue, and all other bytes are missing.
  void RunOneAndQueueOne() {
    BlockALane();
    SendHead(0);
    device.WaitForWaiting(2);
    SendHead(1);
    server->WaitForQueued(1);
  }

  // Reads all streams to their ends. The header must come once, in front of all else on the first.
  void ExpectAnswer() {
    std::vector<std::thread> readers;
    for (size_t i = 0; i < streams.size(); ++i) {
      readers.emplace_back([&, i] {
        v1::AttendChunkedResponse message;
        for (int n = 0; streams[i]->Receive(&message); ++n) {
          EXPECT_EQ(message.has_response(), i == 0 && n == 0) << "message " << n << " of " << i;
          answer.Add(message);
        }
        const grpc::Status status = streams[i]->Finish();
        EXPECT_TRUE(status.ok()) << status.error_message();
      });
    }
    for (std::thread& reader : readers) reader.join();
    std::string fault;
    ExpectRight(*problem, answer.Build(&fault));
    EXPECT_EQ(fault, "");
  }
  // No stream may have a chunk on its way: then all say what the request ended with.
  void ExpectEnd(grpc::StatusCode code, const std::string& text) {
    for (const auto& stream : streams) {
      const grpc::Status status = stream->Finish();
      EXPECT_EQ(status.error_code(), code) << status.error_message();
      EXPECT_NE(status.error_message().find(text), std::string::npos) << status.error_message();
    }
  }

  const std::shared_ptr<TestServer> server;
  test::FakeBackend& device;
  const std::shared_ptr<const LargeProblem> problem;
  std::vector<std::unique_ptr<ChunkedStreamClient>> streams;
  std::unique_ptr<Blocker> blocker;  // null: no lane is taken
  AnswerBuilder answer;              // what was read
};

inline void ExpectServed(TestServer& server, const LargeProblem& problem, int streams = 2) {
  const uint64_t seed = FreshSeed();
  const ChunkedOutcome outcome = AttendOverStreams(server, problem.request, streams, 600'000, seed);
  ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
  SCOPED_TRACE("seed " + std::to_string(seed) + ", streams " + std::to_string(streams));
  ExpectRight(problem, outcome.response);
}

}  // namespace attend::test
