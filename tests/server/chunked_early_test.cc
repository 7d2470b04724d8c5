// SPDX-License-Identifier: Apache-2.0
//
// Uploads that are computed while they arrive: heads whose bytes are there are answered before
// others' have come; whatever ends such a request ends it once, with one status, and no memory goes
// back under a part that runs.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/chunked_client.h"
#include "tests/server/messages.h"
#include "tests/server/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::ChunkedStreamClient;
using test::TestServer;
using test::WireProblem;
using testing::FakeBackend;
using testing::FakeStream;

// A head of each tensor is exactly one of the pieces that a staging copies.
constexpr int64_t kRows = 4096;
constexpr int64_t kDim = 64;
constexpr int64_t kHeadBytes = kRows * kDim * 4;
static_assert(kHeadBytes == StagingOptions{}.piece_bytes);

// Every KV head of every sequence is a part of its own.
std::vector<AttentionSlice> HeadByHead(const Attention& a) {
  const Problem& p = a.problem;
  std::vector<AttentionSlice> parts;
  if (p.packed || p.len_q == 0) return parts;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_kv; ++h) parts.push_back({b, b + 1, h, h + 1, 0, p.len_q});
  }
  return parts;
}

// Costs next to nothing, and no byte of Q, K or V could be another one unnoticed. Of one sequence,
// Q, K and V of one shape, rows that follow each other.
void Mix(const Attention& a) {
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
    const test::ProblemSpec spec =
        test::MakeSpec(1, heads_kv * group, heads_kv, kRows, kRows, kDim, kDim);
    const test::OwnedAttention owned = test::MakeAttention(spec, 1);
    request = test::ToRequest(spec, owned);
    const Attention& a = owned.attention;
    Mix(a);
    o.assign(static_cast<const char*>(a.o.data), static_cast<size_t>(BytesO(a.problem)));
    lse.assign(reinterpret_cast<const char*>(a.lse), static_cast<size_t>(BytesLse(a.problem)));
  }
};

// Without the bytes, which are millions.
void ExpectRight(const LargeProblem& problem, const v1::AttendResponse& response) {
  ASSERT_EQ(response.raw_size(), 2);
  EXPECT_TRUE(response.raw(0) == problem.o) << "O";
  EXPECT_TRUE(response.raw(1) == problem.lse) << "LSE";
}

std::unique_ptr<TestServer> PartsServer(const std::function<void(Config&)>& change = {},
                                        int devices = 1) {
  auto server = std::make_unique<TestServer>(
      [&](Config& config) {
        config.staging_min_bytes = 1;
        config.log_level = "off";
        config.copy_threads = 2;
        if (change) change(config);
      },
      devices, TestServer::Devices::kStaging);
  for (int i = 0; i < devices; ++i) {
    server->backend(i).MoveSpans();
    server->backend(i).SetParts(HeadByHead);
  }
  return server;
}

void OneLane(Config& config) { config.lanes = 1; }

const StagingBudget& Budget(TestServer& server) { return server.server().engine().staging(); }

void AwaitNothingHeld(TestServer& server, int devices = 1) {
  Engine& engine = server.server().engine();
  while (engine.inflight() > 0 || engine.host_pool().used_bytes() > 0) std::this_thread::yield();
  for (int i = 0; i < devices; ++i) {
    while (Budget(server).held_bytes(i) > 0) std::this_thread::yield();
    EXPECT_EQ(server.backend(i).staging().counts().device_bytes, 0);
  }
}

// A server and a large request to it over some streams, admitted and joined. Nothing of it may be
// left at the end.
struct Upload {
  Upload(int64_t heads, size_t count, const std::function<void(Config&)>& change = {})
      : server(PartsServer(change)), device(server->backend()), problem(heads) {
    device.SetCompute(Mix);
    streams.push_back(std::make_unique<ChunkedStreamClient>(*server));
    EXPECT_TRUE(streams[0]->SendHeader(test::ChunkedHeader(problem.request)));
    const std::string token = streams[0]->Receive().grant().token();
    while (streams.size() < count) {
      streams.push_back(std::make_unique<ChunkedStreamClient>(*server));
      EXPECT_TRUE(streams.back()->SendToken(token));
      EXPECT_TRUE(streams.back()->Receive().has_grant());
    }
  }
  ~Upload() {
    streams.clear();
    device.Release();
    AwaitNothingHeld(*server);
  }

  // The head's Q, K and V, in turn by all streams.
  void SendHead(size_t head) {
    const auto bytes = static_cast<size_t>(kHeadBytes);
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(streams[static_cast<size_t>(i) % streams.size()]->SendChunk(
          i + 1, head * bytes, problem.request.raw(i).substr(head * bytes, bytes)));
    }
  }
  // The first head's part stands at the device's gate, the second's in the queue before the one
  // lane, and all other bytes are missing.
  void RunOneAndQueueOne() {
    device.Hold();
    SendHead(0);
    device.WaitForWaiting(1);
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
    ExpectRight(problem, answer.Build(&fault));
    EXPECT_EQ(fault, "");
  }
  // No stream may have a chunk on its way: then all say what the request ended with.
  void ExpectEnd(StatusCode code, const std::string& text) {
    for (const auto& stream : streams) {
      const grpc::Status status = stream->Finish();
      EXPECT_EQ(status.error_code(), code) << status.error_message();
      EXPECT_NE(status.error_message().find(text), std::string::npos) << status.error_message();
    }
  }

  std::unique_ptr<TestServer> server;
  FakeBackend& device;
  const LargeProblem problem;
  std::vector<std::unique_ptr<ChunkedStreamClient>> streams;
  test::AnswerBuilder answer;  // what was read
};

void ExpectServed(TestServer& server, const LargeProblem& problem, int streams = 2) {
  const uint64_t seed = test::FreshSeed();
  const test::ChunkedOutcome outcome =
      test::AttendOverStreams(server, problem.request, streams, 600'000, seed);
  ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
  SCOPED_TRACE("seed " + std::to_string(seed) + ", streams " + std::to_string(streams));
  ExpectRight(problem, outcome.response);
}

TEST(ChunkedEarlyTest, TheFirstHeadIsAnsweredWhileTheLastIsToBeSent) {
  Upload upload(2, 2);
  upload.SendHead(0);
  std::string o, lse;
  while (o.size() < static_cast<size_t>(kHeadBytes) || lse.size() < size_t{kRows} * 4) {
    v1::AttendChunkedResponse message;
    ASSERT_TRUE(upload.streams[1]->Receive(&message)) << "the stream has ended";
    ASSERT_FALSE(message.has_response() || message.has_grant());
    std::string& tensor = message.tensor() == v1::TENSOR_NAME_O ? o : lse;
    ASSERT_EQ(message.offset(), tensor.size());
    tensor += message.data();
    upload.answer.Add(message);
  }
  EXPECT_TRUE(o == upload.problem.o.substr(0, static_cast<size_t>(kHeadBytes)));
  EXPECT_TRUE(lse == upload.problem.lse.substr(0, size_t{kRows} * 4));
  EXPECT_EQ(upload.server->server().engine().inflight(), 0) << "the whole is not there yet";
  upload.SendHead(1);
  upload.ExpectAnswer();  // the first stream has been silent until its header
  EXPECT_EQ(Budget(*upload.server).parts(), 2);
}

TEST(ChunkedEarlyTest, OneStreamIsComputedEarlyAndAnsweredAfterItsHeader) {
  Upload upload(2, 1);
  upload.SendHead(1);  // in any order
  upload.device.WaitForBatches(1);
  EXPECT_EQ(upload.server->server().engine().inflight(), 0) << "the whole is not there yet";
  upload.SendHead(0);
  upload.ExpectAnswer();
  EXPECT_EQ(upload.device.batch_sizes(), std::vector<int64_t>({1, 1}));
  EXPECT_EQ(Budget(*upload.server).parts(), 2);
}

TEST(ChunkedEarlyTest, EveryFeatureInRandomOrder) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto server = PartsServer({}, 2);
  // B2 Hq6 Hkv3, in parts for certain.
  WireProblem grouped;
  grouped.spec = test::MakeSpec(2, 6, 3, 20, 33, 16, 24);
  grouped.owned = test::MakeAttention(grouped.spec, seed);
  grouped.request = test::ToRequest(grouped.spec, grouped.owned);
  const int rounds = std::max(20, static_cast<int>(60 * test::TestScale()));
  for (int i = 0; i < rounds; ++i) {
    SCOPED_TRACE(i);
    const int64_t parts = Budget(*server).parts();
    WireProblem random = test::RandomWireProblem(seed + static_cast<uint64_t>(i), 3e4);
    WireProblem& problem = i % 4 == 1 ? grouped : random;
    problem.request.set_check(i % 8 < 2);
    const test::ChunkedOutcome outcome =
        test::AttendOverStreams(*server, problem.request, 1 + i % 3, 3000, seed);
    ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
    EXPECT_EQ(test::Judge(problem, outcome.response), "");
    EXPECT_EQ(outcome.response.check().ok(), problem.request.check())
        << outcome.response.check().detail();
    // They lie in one piece, so all begin with the last byte, but before the whole.
    EXPECT_TRUE(&problem != &grouped || Budget(*server).parts() == parts + 6);
  }
  AwaitNothingHeld(*server, 2);
}

TEST(ChunkedEarlyTest, LargeGroupsOfHeadsInRandomOrder) {
  const auto server = PartsServer();
  server->backend().SetCompute(Mix);
  const LargeProblem problem(2, 2);
  for (const int streams : {1, 2, 3, 4}) {
    ExpectServed(*server, problem, streams);
    EXPECT_EQ(Budget(*server).parts(), 2 * streams);
  }
  AwaitNothingHeld(*server);
}

// The client hears of the end when the part has ended, and nothing goes back before.
TEST(ChunkedEarlyTest, AStreamIsCancelledWhileAPartRuns) {
  for (const size_t lost : {size_t{0}, size_t{1}}) {
    std::atomic<int64_t> pool_bytes{0}, staging_bytes{0};  // under the part
    Upload upload(3, 2, OneLane);
    upload.device.SetCompute([&](const Attention& a) {
      pool_bytes = upload.server->server().engine().host_pool().used_bytes();
      staging_bytes = Budget(*upload.server).held_bytes(0);
      Mix(a);
    });
    upload.RunOneAndQueueOne();
    upload.streams[lost]->Cancel();
    upload.server->WaitForQueued(0);  // the server knows: what only waited is dropped
    EXPECT_EQ(upload.device.waiting_batches(), 1);
    upload.device.Release();
    upload.ExpectEnd(StatusCode::CANCELLED, "");
    EXPECT_GE(pool_bytes, 4 * 3 * kHeadBytes) << "input and output";
    EXPECT_EQ(staging_bytes, 3 * 3 * kHeadBytes);
    EXPECT_EQ(upload.device.submitted_items(), 1) << "what was dropped ran";
  }
}

TEST(ChunkedEarlyTest, APartThatFailsEndsTheUpload) {
  Upload upload(2, 2);
  upload.device.FailItem(1, Internal("cudaErrorPretend (999)"));
  upload.SendHead(0);
  upload.ExpectEnd(StatusCode::INTERNAL, "cudaErrorPretend");
  EXPECT_EQ(upload.device.submitted_items(), 1);
  ExpectServed(*upload.server, upload.problem);
}

// What cannot be begun early is begun with the last byte, without the copy if that has failed.
TEST(ChunkedEarlyTest, CopiesAndMarksMayFailUnseen) {
  using Fault = std::function<void(FakeStream&)>;
  const Fault copy = [](FakeStream& stream) { stream.FailCopy(1, Internal("cudaErrorPretend")); };
  const Fault mark = [](FakeStream& stream) { stream.FailMark(1, Internal("cudaErrorPretend")); };
  const Fault end = [](FakeStream& stream) { stream.FailFinish(1, Internal("cudaErrorPretend")); };
  struct Case {
    std::vector<Fault> before, between;  // the heads
    int64_t early, batches;
    StagingEnd end;
  };
  const Case cases[] = {{{}, {copy}, 1, 2, StagingEnd::kCopyFailed},
                        {{}, {mark}, 1, 2, StagingEnd::kUsed},
                        {{}, {mark, end}, 1, 2, StagingEnd::kCopyFailed},
                        {{mark}, {}, 1, 2, StagingEnd::kUsed},
                        {{mark}, {mark}, 0, 1, StagingEnd::kUsed}};  // as one, as ever
  for (const Case& each : cases) {
    SCOPED_TRACE("case " + std::to_string(&each - cases));
    Upload upload(2, 2);
    FakeStream& stream = upload.device.staging();
    for (const Fault& fault : each.before) fault(stream);
    upload.SendHead(0);
    while (stream.counts().marks == 0) std::this_thread::yield();
    for (const Fault& fault : each.between) fault(stream);
    upload.SendHead(1);
    upload.ExpectAnswer();
    EXPECT_EQ(Budget(*upload.server).parts(), each.early);
    EXPECT_EQ(upload.device.submitted_batches(), each.batches);
    EXPECT_EQ(Budget(*upload.server).ends(each.end), 1);
  }
}

TEST(ChunkedEarlyTest, TheDeviceIsLostWhileAPartRuns) {
  Upload upload(2, 2, [](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  upload.device.Hold();
  upload.SendHead(0);
  upload.device.WaitForWaiting(1);
  upload.device.LoseDevice();
  upload.device.Release();
  upload.ExpectEnd(StatusCode::UNAVAILABLE, "lost");
  EXPECT_EQ(upload.server->Metric("attend_requests_total{code=\"UNAVAILABLE\"}"), 1);
  EXPECT_EQ(upload.server->Metric("attend_staged_parts_total"), 1);
}

// Chunks that nobody reads are in the way of neither the upload nor the other parts.
TEST(ChunkedEarlyTest, AClientReadsNothingBeforeTheEnd) {
  Upload upload(3, 2);
  for (const size_t head : {2, 0, 1}) upload.SendHead(head);
  upload.device.WaitForBatches(3);
  // The input goes back when the whole has ended.
  while (Budget(*upload.server).held_bytes(0) > 0) std::this_thread::yield();
  upload.ExpectAnswer();
}

TEST(ChunkedEarlyTest, DrainEndsAnUploadOfWhichAPartRuns) {
  Upload upload(3, 2, OneLane);
  upload.RunOneAndQueueOne();
  std::future<bool> drained = std::async(
      std::launch::async, [&] { return upload.server->server().Drain(std::chrono::seconds(60)); });
  upload.server->WaitForQueued(0);
  upload.device.Release();
  upload.ExpectEnd(StatusCode::UNAVAILABLE, "draining");
  for (const auto& stream : upload.streams) EXPECT_GT(stream->PushbackMs(), 0);
  EXPECT_TRUE(drained.get());
  EXPECT_EQ(upload.device.submitted_items(), 1);
}

// The parts that are dropped then end with another status, which is nobody's business.
TEST(ChunkedEarlyTest, AWholeThatIsRefusedKeepsItsStatus) {
  Upload upload(3, 1, OneLane);
  upload.RunOneAndQueueOne();
  upload.server->server().engine().Drain();  // and the upload is not told
  upload.SendHead(2);
  upload.server->WaitForQueued(0);
  upload.device.Release();
  upload.ExpectEnd(StatusCode::UNAVAILABLE, "draining");
}

TEST(ChunkedEarlyTest, HalfClosedWithBytesMissingAfterAPartRan) {
  Upload upload(2, 1);
  upload.SendHead(0);
  while (upload.device.calls().item == 0) std::this_thread::yield();
  upload.streams[0]->HalfClose();
  upload.ExpectEnd(StatusCode::INVALID_ARGUMENT,
                   "missing are 1048576 of q's 2097152 bytes, 1048576 of k's 2097152 bytes, "
                   "1048576 of v's 2097152 bytes");
  ExpectServed(*upload.server, upload.problem);
}

}  // namespace
}  // namespace attend
