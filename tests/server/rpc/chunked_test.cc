// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked on whole servers: right answers for any chunks and streams, and every refusal.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

#include "server/engine/engine.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::ChunkedHeader;
using test::ChunkedOutcome;
using test::ChunkedStreamClient;
using test::TestServer;
using test::WireProblem;

void WaitUntilEmpty(TestServer& server) {
  while (server.server().engine().inflight() > 0) std::this_thread::yield();
  while (server.server().engine().host_pool().used_bytes() > 0) std::this_thread::yield();
}

// O is the first bytes of V: shows that every byte arrives and leaves, and takes no time.
void CopyV(const Attention& a) {
  std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
}

TEST(ChunkedTest, AnswersAnyRequestExactly) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TestServer server;
  const int rounds = std::max(10, static_cast<int>(60 * test::TestScale()));
  for (int i = 0; i < rounds; ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i, 5e4);
    problem.request.set_check(i % 4 == 0);
    const int streams = 1 + i % 8;
    const ChunkedOutcome outcome =
        test::AttendOverStreams(server, problem.request, streams, 2000, seed + i);
    ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message() << " "
                              << Describe(problem.spec);
    EXPECT_EQ(test::Judge(problem, outcome.response), "") << Describe(problem.spec);
    EXPECT_EQ(outcome.response.request_id(), problem.request.request_id());
    EXPECT_EQ(outcome.response.transport(), "chunked");
    EXPECT_EQ(outcome.response.has_check(), problem.request.check());
    EXPECT_GT(outcome.response.timings().total_ns(), 0);
  }
  WaitUntilEmpty(server);
}

TEST(ChunkedTest, LargeTensorsArriveWholeOverEightStreams) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TestServer server([](Config& config) { config.copy_threads = 3; });
  server.backend().SetCompute(CopyV);
  for (const int streams : {1, 3, 8}) {
    const WireProblem problem = test::PlainWireProblem(seed, 6000, 128);  // 18 MiB
    const ChunkedOutcome outcome =
        test::AttendOverStreams(server, problem.request, streams, 3 << 20, seed);
    ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
    EXPECT_TRUE(outcome.response.raw(0) == problem.request.raw(2));
  }
  WaitUntilEmpty(server);
}

TEST(ChunkedTest, EmptyTensorsNeedNoChunk) {
  TestServer server;
  const WireProblem problem = test::PlainWireProblem(1, 0);
  const ChunkedOutcome outcome = test::AttendOverStreams(server, problem.request, 1, 100, 1);
  ASSERT_TRUE(outcome.ok()) << outcome.fault << outcome.statuses[0].error_message();
  EXPECT_EQ(outcome.response.raw(0), "");
}

TEST(ChunkedTest, TheGrantContainsTheBounds) {
  TestServer server([](Config& config) {
    config.chunked_streams_max = 5;
    config.chunked_idle_timeout_seconds = 12.5;
  });
  const WireProblem problem = test::PlainWireProblem(1);
  ChunkedStreamClient first(server), second(server);
  ASSERT_TRUE(first.SendHeader(ChunkedHeader(problem.request)));
  const v1::ChunkedGrant grant = first.Receive().grant();
  EXPECT_EQ(grant.token().size(), 16u);
  EXPECT_EQ(grant.streams_max(), 5);
  EXPECT_EQ(grant.chunk_bytes_max(), 4 << 20);
  EXPECT_EQ(grant.idle_timeout_ms(), 12500);
  ASSERT_TRUE(second.SendToken(grant.token()));
  EXPECT_EQ(second.Receive().grant().token(), "");
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  ASSERT_TRUE(server.Stub()->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.limits().chunked_streams_max(), 5);
  EXPECT_EQ(info.limits().chunk_bytes_max(), 4 << 20);
  EXPECT_EQ(info.transports_size(), 2);
}

TEST(ChunkedTest, DataAfterTheLastByteIsIgnored) {
  TestServer server;
  server.backend().Hold();
  WireProblem problem = test::PlainWireProblem(2);
  ChunkedStreamClient client(server);
  ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
  for (int i = 0; i < 3; ++i) client.SendChunk(i + 1, 0, problem.request.raw(i));
  server.backend().WaitForWaiting(1);  // complete without a half-close
  client.SendChunk(1, 0, "again");
  client.SendChunk(99, 0, "nonsense");
  server.backend().Release();
  EXPECT_TRUE(client.Finish().ok());
  WaitUntilEmpty(server);
}

// An error of a client after its header was admitted, and the expected status. q has 1024 bytes.
struct BadUpload {
  const char* name;
  std::function<void(ChunkedStreamClient&)> act;
  const char* told;
};

const std::string kKilobyte(1024, 'x');

const BadUpload kBadUploads[] = {
    {"duplicate",
     [](auto& c) {
       c.SendChunk(1, 0, kKilobyte);
       c.SendChunk(1, 0, kKilobyte);
     },
     "chunk of q, offset 0, 1024 bytes, overlaps bytes that arrived before: [0, 1024)"},
    {"overlap at the end",
     [](auto& c) {
       c.SendChunk(2, 100, "abc");
       c.SendChunk(2, 98, "abc");
     },
     "chunk of k, offset 98, 3 bytes, overlaps bytes that arrived before: [100, 103)"},
    {"overlap at the beginning",
     [](auto& c) {
       c.SendChunk(3, 100, "abc");
       c.SendChunk(3, 102, "a");
     },
     "chunk of v, offset 102, 1 bytes, overlaps bytes that arrived before: [100, 103)"},
    {"past the end", [](auto& c) { c.SendChunk(1, 1022, "abc"); },
     "chunk of q, offset 1022, 3 bytes, ends past the tensor's 1024 bytes"},
    {"longer than the tensor", [](auto& c) { c.SendChunk(1, 0, kKilobyte + "y"); },
     "offset 0, 1025 bytes, ends past the tensor's 1024 bytes"},
    {"the sum overflows", [](auto& c) { c.SendChunk(1, UINT64_MAX - 1, "abc"); },
     "offset 18446744073709551614, 3 bytes, ends past"},
    {"the sum overflows 63 bits", [](auto& c) { c.SendChunk(1, INT64_MAX, "a"); },
     "offset 9223372036854775807, 1 bytes, ends past"},
    {"no tensor", [](auto& c) { c.SendChunk(0, 0, "abc"); },
     "a chunk's tensor is 0, must be Q (1), K (2) or V (3)"},
    {"a bias that the header lacks", [](auto& c) { c.SendChunk(4, 0, "abc"); },
     "a chunk's tensor is 4, must be Q (1), K (2) or V (3)"},
    {"an answer's tensor", [](auto& c) { c.SendChunk(5, 0, "abc"); }, "a chunk's tensor is 5"},
    {"a negative tensor", [](auto& c) { c.SendChunk(-1, 0, "abc"); }, "a chunk's tensor is -1"},
    {"the lowest tensor", [](auto& c) { c.SendChunk(INT32_MIN, 0, "abc"); },
     "a chunk's tensor is -2147483648"},
    {"no data", [](auto& c) { c.SendChunk(1, 0, ""); }, "data has 0 bytes, must have 1 to 4194304"},
    {"too much data", [](auto& c) { c.SendChunk(1, 0, std::string((4 << 20) + 1, 'x')); },
     "data has 4194305 bytes, must have 1 to 4194304"},
    {"far too much data", [](auto& c) { c.SendChunk(1, 0, std::string(6 << 20, 'x')); },
     "the chunk's message has "},
    {"a second header", [](auto& c) { c.SendHeader({}); }, "only in the stream's first message"},
    {"a token on the same stream", [](auto& c) { c.SendToken("abc"); },
     "only in the stream's first message"},
    {"missing bytes",
     [](auto& c) {
       c.SendChunk(1, 0, kKilobyte);
       c.SendChunk(2, 1, "abc");
       c.HalfClose();
     },
     "bytes are missing: 1021 of k's 1024 bytes, 1024 of v's 1024 bytes"},
    {"nothing at all", [](auto& c) { c.HalfClose(); }, "bytes are missing: 1024 of q's 1024 bytes"},
};

TEST(ChunkedTest, BadUploadsAreRefusedAndLeaveNothingBehind) {
  TestServer server;
  const WireProblem problem = test::PlainWireProblem(3);
  for (const BadUpload& bad : kBadUploads) {
    SCOPED_TRACE(bad.name);
    ChunkedStreamClient client(server);
    ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
    EXPECT_TRUE(client.Receive().has_grant());
    EXPECT_GT(server.server().engine().host_pool().used_bytes(), 0);
    bad.act(client);
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find(bad.told), std::string::npos) << status.error_message();
    EXPECT_EQ(server.server().engine().host_pool().used_bytes(), 0);
  }
  EXPECT_EQ(server.backend().submitted_items(), 0);
}

TEST(ChunkedTest, TooManySeparatePiecesAreRefused) {
  TestServer server;
  const WireProblem problem = test::PlainWireProblem(3, 512, 32);  // 128 KiB per tensor
  ChunkedStreamClient client(server);
  ASSERT_TRUE(client.SendHeader(ChunkedHeader(problem.request)));
  for (uint64_t i = 0; i < 20000 && client.SendChunk(1, 2 * i, "x"); ++i) {
  }
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("more than 384 separate pieces"), std::string::npos)
      << status.error_message();
}

TEST(ChunkedTest, BadFirstMessagesAreRefused) {
  TestServer server;
  const v1::AttendRequest good = ChunkedHeader(test::PlainWireProblem(4).request);
  struct {
    std::function<void(v1::AttendChunkedRequest&)> make;
    const char* told;
  } const cases[] = {
      {[](auto&) {}, "neither header nor token"},
      {[](auto& m) {
         m.set_tensor(v1::TENSOR_NAME_Q);
         m.set_data("abc");
       },
       "neither header nor token"},
      {[&](auto& m) {
         *m.mutable_header() = good;
         m.set_data("abc");
       },
       "must have no chunk beside its header"},
      {[&](auto& m) {
         *m.mutable_header() = good;
         m.mutable_header()->add_raw("abc");
       },
       "raw has 1 entries, must have none"},
      {[&](auto& m) {
         *m.mutable_header() = good;
         m.mutable_header()->mutable_k()->mutable_inline_bytes();
       },
       "k.source is not chunked"},
      {[&](auto& m) {
         *m.mutable_header() = good;
         m.mutable_header()->mutable_v()->clear_source();
       },
       "v.source is not chunked"},
      {[&](auto& m) {
         *m.mutable_header() = good;
         m.mutable_header()->set_softcap(-1);
       },
       "softcap"},
      {[](auto& m) { m.mutable_header()->set_kernel(std::string(5 << 20, 'k')); },
       "the header has "},
  };
  for (const auto& bad : cases) {
    v1::AttendChunkedRequest message;
    bad.make(message);
    ChunkedStreamClient client(server);
    client.Send(message);
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << bad.told;
    EXPECT_NE(status.error_message().find(bad.told), std::string::npos) << status.error_message();
  }
  ChunkedStreamClient silent(server);
  silent.HalfClose();
  EXPECT_NE(silent.Finish().error_message().find("ended before its first message"),
            std::string::npos);
  WaitUntilEmpty(server);
}

TEST(ChunkedTest, UnaryCallsWithChunkedTensorsAreRefused) {
  TestServer server;
  WireProblem problem = test::PlainWireProblem(5);
  problem.request.mutable_k()->mutable_chunked();
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status status = server.Stub()->Attend(&context, problem.request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("k.source is chunked"), std::string::npos)
      << status.error_message();
}

TEST(ChunkedTest, ATokenJoinsOnlyItsRequestAndAtMostTheAllowedTimes) {
  TestServer server([](Config& config) { config.chunked_streams_max = 3; });
  const WireProblem problem = test::PlainWireProblem(6);
  ChunkedStreamClient first(server);
  ASSERT_TRUE(first.SendHeader(ChunkedHeader(problem.request)));
  const std::string token = first.Receive().grant().token();
  const auto refused = [&](const std::string& by, StatusCode code, const char* told) {
    ChunkedStreamClient stream(server);
    stream.SendToken(by);
    const grpc::Status status = stream.Finish();
    EXPECT_EQ(status.error_code(), code);
    EXPECT_NE(status.error_message().find(told), std::string::npos) << status.error_message();
  };
  std::string guess = token;
  guess[15] = static_cast<char>(guess[15] ^ 1);
  refused(guess, StatusCode::NOT_FOUND, "no request has this token");
  refused("", StatusCode::NOT_FOUND, "no request has this token");
  ChunkedStreamClient second(server), third(server);
  for (ChunkedStreamClient* stream : {&second, &third}) {
    ASSERT_TRUE(stream->SendToken(token));
    EXPECT_TRUE(stream->Receive().has_grant());
  }
  refused(token, StatusCode::INVALID_ARGUMENT, "may have at most 3 (chunked-streams-max)");
  // None of this affects the request.
  for (int i = 0; i < 3; ++i) second.SendChunk(i + 1, 0, problem.request.raw(i));
  EXPECT_TRUE(first.Finish().ok());
  EXPECT_TRUE(second.Finish().ok());
  EXPECT_TRUE(third.Finish().ok());
  WaitUntilEmpty(server);
  refused(token, StatusCode::NOT_FOUND, "");
}

TEST(ChunkedTest, AnUploadFailsOnlyWhenNoStreamCanBringTheMissingBytes) {
  TestServer server;
  WireProblem problem = test::PlainWireProblem(7);
  ChunkedStreamClient first(server), second(server);
  ASSERT_TRUE(first.SendHeader(ChunkedHeader(problem.request)));
  ASSERT_TRUE(second.SendToken(first.Receive().grant().token()));
  EXPECT_TRUE(second.Receive().has_grant());
  first.HalfClose();
  second.SendChunk(1, 0, problem.request.raw(0));
  second.HalfClose();
  for (ChunkedStreamClient* stream : {&first, &second}) {
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find("1024 of k's 1024 bytes, 1024 of v's"), std::string::npos)
        << status.error_message();
  }
}

TEST(ChunkedTest, MetricsCountRequestsNotStreams) {
  TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const WireProblem problem = test::PlainWireProblem(8);
  ASSERT_TRUE(test::AttendOverStreams(server, problem.request, 3, 500, 8).ok());
  ChunkedStreamClient bad(server);
  ASSERT_TRUE(bad.SendHeader(ChunkedHeader(problem.request)));
  bad.SendChunk(1, 5000, "abc");
  EXPECT_FALSE(bad.Finish().ok());
  EXPECT_EQ(server.Metric("attend_requests_total{code=\"OK\"}"), 1);
  EXPECT_EQ(server.Metric("attend_requests_total{code=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"invalid\"}"), 1);
  const char* const kBytes = "attend_transport_bytes_total{direction=\"";
  EXPECT_EQ(server.Metric(kBytes + std::string("out\",transport=\"chunked\"}")), 1024 + 64);
  EXPECT_GT(server.Metric(kBytes + std::string("in\",transport=\"chunked\"}")), 3 * 1024);
  EXPECT_EQ(server.Metric(kBytes + std::string("in\",transport=\"inline\"}")), 0);
}

}  // namespace
}  // namespace attend
