// SPDX-License-Identifier: Apache-2.0
//
// Ends of uploads that are computed while they arrive: a request that has failed holds nothing,
// whether its clients read or not; those that read hear why it failed; and whatever goes wrong at
// whatever moment, every stream ends and the server serves on.

#include <gmock/gmock.h>
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
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/chunked_early_fixture.h"

namespace attend {
namespace {

using grpc::StatusCode;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using test::AwaitNothingHeld;
using test::Budget;
using test::ChunkedStreamClient;
using test::ExpectServed;
using test::FakeBackend;
using test::FakeStream;
using test::kHeadBytes;
using test::LargeProblem;
using test::ManualClock;
using test::PartsServer;
using test::TestServer;
using test::Upload;
using ::testing::AnyOf;

// Their O, 1 MiB each, is more than sockets and windows take in while nobody reads.
constexpr size_t kStuckHeads = 8;

// Bytes come a second time.
void Overlap(Upload& upload) { upload.streams[0]->SendChunk(1, 0, "overlap"); }
// Head `next` fails on the device.
void FailPart(Upload& upload, size_t next) {
  upload.device.FailItem(1, Internal("cudaErrorPretend (999)"));
  upload.TrySendHead(next);
}

TEST(ChunkedEarlyEndTest, AClientThatDoesNotReadKeepsNothingOfAFailedRequest) {
  struct Case {
    std::function<void(Upload&)> fail;
    StatusCode code;
    std::string text;
  };
  const Case cases[] = {{Overlap, StatusCode::INVALID_ARGUMENT, "overlaps"},
                        {[](Upload& upload) { FailPart(upload, kStuckHeads); },
                         StatusCode::INTERNAL, "cudaErrorPretend"}};
  const auto problem = std::make_shared<const LargeProblem>(kStuckHeads + 2);
  for (const Case& each : cases) {
    SCOPED_TRACE("case " + std::to_string(&each - cases));
    const auto clock = std::make_shared<ManualClock>();
    const auto change = [](Config& config) { config.chunked_idle_timeout_seconds = 0.1; };
    Upload upload(PartsServer(change, 1, clock), problem, 2);
    for (size_t head = 0; head < kStuckHeads; ++head) upload.SendHead(head);
    // Most have ended, as no more are open than the device has lanes. The first one's chunks were
    // due to the second stream since then.
    while (upload.device.calls().item < static_cast<int64_t>(kStuckHeads)) {
      std::this_thread::yield();
    }
    each.fail(upload);
    const grpc::Status first = upload.streams[0]->Finish();
    EXPECT_EQ(first.error_code(), each.code) << first.error_message();
    EXPECT_NE(first.error_message().find(each.text), std::string::npos) << first.error_message();
    EXPECT_GT(upload.server->server().engine().host_pool().used_bytes(), 0) << "nothing is stuck";
    clock->Advance(milliseconds(100));
    AwaitNothingHeld(*upload.server);  // and the second stream has read nothing
    EXPECT_FALSE(upload.streams[1]->Finish().ok());
  }
}

// Also if a chunk was on its way to it.
TEST(ChunkedEarlyEndTest, AClientThatReadsHearsWhyTheRequestFailed) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::shared_ptr<TestServer> server = PartsServer();
  const auto problem = std::make_shared<const LargeProblem>(4);
  const int rounds = std::max(10, static_cast<int>(30 * test::TestScale()));
  for (int i = 0; i < rounds; ++i) {
    const bool part_fails = i % 2 == 1;
    SCOPED_TRACE("round " + std::to_string(i));
    Upload upload(server, problem, 2);
    grpc::Status ends[2];
    std::vector<std::thread> readers;
    for (const size_t s : {0, 1}) {
      readers.emplace_back([&, s] { ends[s] = upload.streams[s]->Finish(); });
    }
    const size_t heads = 1 + random() % 3;  // of four
    if (part_fails) {
      const int item = static_cast<int>(1 + random() % heads);
      upload.device.FailItem(item, Internal("cudaErrorPretend (999)"));
    }
    for (size_t head = 0; head < heads && upload.TrySendHead(head); ++head) {
    }
    if (!part_fails) {
      std::this_thread::sleep_for(microseconds(random() % 4000));
      Overlap(upload);
    }
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(ends[0].error_code(),
              part_fails ? StatusCode::INTERNAL : StatusCode::INVALID_ARGUMENT)
        << ends[0].error_message();
    EXPECT_EQ(ends[1].error_code(), ends[0].error_code()) << ends[1].error_message();
    EXPECT_EQ(ends[1].error_message(), ends[0].error_message());
    upload.device.ForgetFaults();
  }
}

TEST(ChunkedEarlyEndTest, TheDeadlinePassesWhileAPartIsQueued) {
  const std::shared_ptr<TestServer> server = PartsServer([](Config& config) { config.lanes = 1; });
  const auto problem = std::make_shared<const LargeProblem>(2);
  Engine& engine = server->server().engine();
  server->backend().Hold();
  auto blocker = std::make_unique<test::Blocker>(*server);
  server->backend().WaitForWaiting(1);
  {
    const milliseconds timeout(3000);
    const auto late = std::chrono::steady_clock::now() + timeout;
    Upload upload(server, problem, 2, timeout);
    upload.blocker = std::move(blocker);
    upload.TrySendHead(0);
    while (engine.Devices()[0].queued == 0 && std::chrono::steady_clock::now() < late) {
      std::this_thread::yield();
    }
    EXPECT_EQ(engine.Devices()[0].queued, 1) << "too slow to queue it in time";
    // It is dropped when it would be late, shortly before the deadline.
    EXPECT_THAT(upload.streams[0]->Finish().error_code(),
                AnyOf(StatusCode::DEADLINE_EXCEEDED, StatusCode::RESOURCE_EXHAUSTED));
    // The first one's reset may come to the server before the deadline does by its own clock.
    EXPECT_THAT(upload.streams[1]->Finish().error_code(),
                AnyOf(StatusCode::DEADLINE_EXCEEDED, StatusCode::RESOURCE_EXHAUSTED,
                      StatusCode::CANCELLED));
    // Nothing of it is left, while the blocker is at the gate.
    server->WaitForQueued(0);
    while (Budget(*server).held_bytes(0) > 0) std::this_thread::yield();
    EXPECT_EQ(server->backend().submitted_items(), 1) << "the blocker alone";
    EXPECT_EQ(server->backend().waiting_batches(), 1);
  }
  ExpectServed(*server, *problem);
  AwaitNothingHeld(*server);
}

enum class Wrong { kNothing, kCancel, kBadChunk, kHalfClose, kDeadline, kLost };
constexpr int kWrongs = 6;

// One upload with one thing done wrong, or nothing, at a random moment. All its streams end.
void RandomUpload(TestServer& server, const LargeProblem& problem, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto wrong = static_cast<Wrong>(random() % kWrongs);
  const milliseconds timeout(wrong == Wrong::kDeadline ? 1 + random() % 80 : 60'000);
  const size_t count = 1 + random() % 3;
  std::vector<std::unique_ptr<ChunkedStreamClient>> streams;
  streams.push_back(std::make_unique<ChunkedStreamClient>(server, timeout));
  streams[0]->SendHeader(test::ChunkedHeader(problem.request));
  v1::AttendChunkedResponse grant;
  if (!streams[0]->Receive(&grant)) {
    EXPECT_EQ(streams[0]->Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
    return;
  }
  while (streams.size() < count) {
    streams.push_back(std::make_unique<ChunkedStreamClient>(server));
    streams.back()->SendToken(grant.grant().token());
  }
  const size_t victim = random() % count;
  test::AnswerBuilder answer;
  std::vector<grpc::Status> ends(count, grpc::Status(StatusCode::UNKNOWN, "nobody read it"));
  std::vector<std::thread> readers;
  for (size_t s = 0; s < count; ++s) {
    if (wrong == Wrong::kLost && s == victim) continue;
    readers.emplace_back([&, s] {
      v1::AttendChunkedResponse message;
      while (streams[s]->Receive(&message)) answer.Add(message);
      ends[s] = streams[s]->Finish();
    });
  }
  // Chunks of a head each, the heads in random order.
  const auto bytes = static_cast<size_t>(kHeadBytes);
  std::vector<size_t> heads(problem.request.raw(0).size() / bytes);
  for (size_t h = 0; h < heads.size(); ++h) heads[h] = h;
  std::shuffle(heads.begin(), heads.end(), random);
  const size_t stop = random() % (3 * heads.size());
  for (size_t n = 0; n < 3 * heads.size(); ++n) {
    if (n == stop) {
      if (wrong == Wrong::kCancel) streams[victim]->Cancel();
      if (wrong == Wrong::kBadChunk) streams[victim]->SendChunk(1, UINT64_MAX / 2, "abc");
      if (wrong == Wrong::kHalfClose) break;
      if (wrong == Wrong::kLost) streams[victim].reset();
    }
    const size_t offset = heads[n / 3] * bytes;
    const int tensor = static_cast<int>(n % 3);
    ChunkedStreamClient* const stream = streams[random() % count].get();
    if (stream == nullptr) continue;
    stream->SendChunk(tensor + 1, offset, problem.request.raw(tensor).substr(offset, bytes));
  }
  for (const auto& stream : streams) {
    if (stream != nullptr) stream->HalfClose();
  }
  for (std::thread& reader : readers) reader.join();
  if (!std::all_of(ends.begin(), ends.end(), [](const auto& end) { return end.ok(); })) return;
  std::string fault;
  test::ExpectRight(problem, answer.Build(&fault));
  EXPECT_EQ(fault, "");
}

// Whatever the device can do while uploads run.
void DisturbOnce(FakeBackend& device, std::mt19937_64& random) {
  FakeStream& stream = device.staging();
  const int n = static_cast<int>(1 + random() % 6);
  const Status fault = Internal("cudaErrorPretend");
  switch (random() % 8) {
    case 0:
      return device.FailItem(n, fault);
    case 1:
      return stream.FailCopy(n, fault);
    case 2:
      return stream.FailMark(n, fault);
    case 3:
      return stream.FailFinish(n, fault);
    case 4:
      return stream.Hold();
    default:
      return stream.Release();
  }
}

TEST(ChunkedEarlyEndTest, RandomUploadsAtOnceLeaveNothing) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto lanes = static_cast<int64_t>(2 + random() % 3);
  const auto server = PartsServer([lanes](Config& config) { config.lanes = lanes; });
  FakeBackend& device = server->backend();
  device.SetCompute(test::Mix);
  const LargeProblem problem(3);
  constexpr int kClients = 3;
  const int rounds = std::max(3, static_cast<int>(8 * test::TestScale()));
  std::atomic<int> ended{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < rounds; ++i) {
        RandomUpload(*server, problem, seed + static_cast<uint64_t>(1000 * c + i));
      }
      ++ended;
    });
  }
  while (ended < kClients) {
    DisturbOnce(device, random);
    std::this_thread::sleep_for(milliseconds(random() % 5));
  }
  for (std::thread& client : clients) client.join();
  device.staging().Release();
  AwaitNothingHeld(*server);
  device.ForgetFaults();
  device.staging().ForgetFaults();
  ExpectServed(*server, problem, 3);
  AwaitNothingHeld(*server);
}

}  // namespace
}  // namespace attend
