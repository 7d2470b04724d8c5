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
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/engine.h"
#include "tests/server/support/chunked_early_fixture.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::AwaitNothingHeld;
using test::Budget;
using test::ExpectServed;
using test::FakeStream;
using test::kHeadBytes;
using test::kRows;
using test::LargeProblem;
using test::PartsServer;
using test::TestServer;
using test::Upload;
using test::WireProblem;

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
  EXPECT_TRUE(o == upload.problem->o.substr(0, static_cast<size_t>(kHeadBytes)));
  EXPECT_TRUE(lse == upload.problem->lse.substr(0, size_t{kRows} * 4));
  EXPECT_EQ(upload.server->server().engine().inflight(), 0) << "the whole is not there yet";
  upload.SendHead(1);
  upload.ExpectAnswer();  // the first stream has been silent until its header
  EXPECT_EQ(Budget(*upload.server).parts(), 1) << "the second had to wait for no others' bytes";
}

TEST(ChunkedEarlyTest, OneStreamIsComputedEarlyAndAnsweredAfterItsHeader) {
  Upload upload(2, 1);
  upload.SendHead(1);  // in any order
  upload.device.WaitForBatches(1);
  EXPECT_EQ(upload.server->server().engine().inflight(), 0) << "the whole is not there yet";
  upload.SendHead(0);
  upload.ExpectAnswer();
  EXPECT_EQ(upload.device.batch_sizes(), std::vector<int64_t>({1, 1}));
  EXPECT_EQ(Budget(*upload.server).parts(), 1);
}

// Both devices'.
int64_t Items(TestServer& server) {
  return server.backend(0).submitted_items() + server.backend(1).submitted_items();
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
    const int64_t items = Items(*server);
    WireProblem random = test::RandomWireProblem(seed + static_cast<uint64_t>(i), 3e4);
    WireProblem& problem = i % 4 == 1 ? grouped : random;
    problem.request.set_check(i % 8 < 2);
    const test::ChunkedOutcome outcome =
        test::AttendOverStreams(*server, problem.request, 1 + i % 3, 3000, seed);
    ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
    EXPECT_EQ(test::Judge(problem, outcome.response), "");
    EXPECT_EQ(outcome.response.check().ok(), problem.request.check())
        << outcome.response.check().detail();
    if (&problem != &grouped) continue;
    // Each tensor is one piece, so all parts are ready with the last one's copy. Several threads
    // copy: each part but the last may find others' bytes not yet counted.
    EXPECT_EQ(Items(*server), items + 6);
    EXPECT_LE(Budget(*server).parts(), parts + 5);
  }
  AwaitNothingHeld(*server, 2);
}

TEST(ChunkedEarlyTest, LargeGroupsOfHeadsInRandomOrder) {
  const auto server = PartsServer();
  server->backend().SetCompute(test::Mix);
  const LargeProblem problem(2, 2);
  for (const int streams : {1, 2, 3, 4}) {
    const int64_t parts = Budget(*server).parts();
    ExpectServed(*server, problem, streams);
    EXPECT_EQ(server->backend().submitted_items(), 2 * streams);
    // One, if not both have become complete with the last chunk.
    EXPECT_LE(Budget(*server).parts(), parts + 1);
  }
  AwaitNothingHeld(*server);
}

// The client hears of the end when the part has ended, and nothing goes back before.
TEST(ChunkedEarlyTest, AStreamIsCancelledWhileAPartRuns) {
  for (const size_t lost : {size_t{0}, size_t{1}}) {
    std::atomic<int64_t> pool_bytes{0}, staging_bytes{0};  // under the part
    Upload upload(3, 2);
    upload.device.SetCompute([&](const Attention& a) {
      if (a.problem.len_q != kRows) return test::Mix(a);  // the blocker
      pool_bytes = upload.server->server().engine().host_pool().used_bytes();
      staging_bytes = Budget(*upload.server).held_bytes(0);
      test::Mix(a);
    });
    upload.RunOneAndQueueOne();
    upload.streams[lost]->Cancel();
    upload.server->WaitForQueued(0);  // the server knows: what only waited is dropped
    EXPECT_EQ(upload.device.waiting_batches(), 2);
    upload.device.Release();
    upload.ExpectEnd(StatusCode::CANCELLED, "");
    EXPECT_GE(pool_bytes, 4 * 3 * kHeadBytes) << "input and output";
    EXPECT_EQ(staging_bytes, 3 * 3 * kHeadBytes);
    EXPECT_EQ(upload.device.submitted_items(), 2) << "what was dropped ran";
  }
}

TEST(ChunkedEarlyTest, APartThatFailsEndsTheUpload) {
  Upload upload(2, 2);
  upload.device.FailItem(1, Internal("cudaErrorPretend (999)"));
  upload.SendHead(0);
  upload.ExpectEnd(StatusCode::INTERNAL, "cudaErrorPretend");
  EXPECT_EQ(upload.device.submitted_items(), 1);
  ExpectServed(*upload.server, *upload.problem);
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
                        {{}, {end}, 1, 2, StagingEnd::kCopyFailed},
                        {{mark}, {}, 0, 2, StagingEnd::kUsed},       // none missed others' bytes
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
  Upload upload(3, 2);
  upload.RunOneAndQueueOne();
  std::future<bool> drained = std::async(
      std::launch::async, [&] { return upload.server->server().Drain(std::chrono::seconds(60)); });
  upload.server->WaitForQueued(0);
  upload.device.Release();
  upload.ExpectEnd(StatusCode::UNAVAILABLE, "draining");
  for (const auto& stream : upload.streams) EXPECT_GT(stream->PushbackMs(), 0);
  EXPECT_TRUE(drained.get());
  EXPECT_EQ(upload.device.submitted_items(), 2) << "the blocker and one part";
}

// The parts that are dropped then end with another status, which is nobody's business.
TEST(ChunkedEarlyTest, AWholeThatIsRefusedKeepsItsStatus) {
  Upload upload(3, 1);
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
                   "bytes are missing: 1048576 of q's 2097152 bytes, 1048576 of k's 2097152 bytes, "
                   "1048576 of v's 2097152 bytes");
  ExpectServed(*upload.server, *upload.problem);
}

}  // namespace
}  // namespace attend
