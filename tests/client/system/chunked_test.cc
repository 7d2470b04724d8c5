// SPDX-License-Identifier: Apache-2.0
//
// Calls sent in chunks: right answers and retries against a whole server, everything else against
// one that misbehaves.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <thread>

#include "client/tool/verify.h"
#include "server/engine/engine.h"
#include "tests/client/support/chunked_calls.h"
#include "tests/client/support/test_seed.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using test::TestServer;
using ::testing::HasSubstr;

// O is V's bytes: takes no time, and shows that every byte arrived and came back.
void CopyV(const Attention& a) {
  std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
}

bool IsV(const HostTensor& o, const AttentionCall& call) {
  return o.bytes == call.v.bytes &&
         std::memcmp(o.data.get(), call.v.data, static_cast<size_t>(o.bytes)) == 0;
}

void WaitUntilEmpty(TestServer& server) {
  while (server.server().engine().inflight() > 0) std::this_thread::yield();
  while (server.server().engine().host_pool().used_bytes() > 0) std::this_thread::yield();
}

TEST(ChunkedClient, AnswersHaveTheBitsOfOneMessage) {
  ATTEND_FRESH_SEED(seed);
  TestServer server;
  const auto client = Connect(server.address(), 4);
  for (const char* text :
       {"B1,H1,L4,D8", "B2,H4,Hkv2,Lq9,Lk33,D64,causal,lse", "B1,H2,L200,D64,dtype=float16,lse",
        "B3,H2,L20,D16,layout=lhd,ragged,bias,alibi,sinks,softcap=8,dtype=bfloat16,lse",
        "B1,H1,Lq0,Lk5,D8,lse", "B1,H1,Lq5,Lk0,D8,lse"}) {
    AttentionCall call = RandomCall(text, seed);
    call.request_id = "mine";
    const Result<AttentionResult> result = client->Call(call, Chunked());
    ASSERT_TRUE(result.ok()) << text << ": " << result.status().ToString();
    EXPECT_EQ(result->transport, "chunked");
    EXPECT_EQ(result->request_id, "mine");
    const Result<RowsReport> report = VerifyAnswer(call, *result, seed);
    ASSERT_TRUE(report.ok()) << text << ": " << report.status().ToString();
    EXPECT_TRUE(report->ok) << text << ": " << report->detail;
    const Result<AttentionResult> whole = client->Call(call);
    ASSERT_TRUE(whole.ok());
    EXPECT_EQ(whole->transport, "inline");
    EXPECT_EQ(whole->o.shape, result->o.shape);
    EXPECT_EQ(
        std::memcmp(whole->o.data.get(), result->o.data.get(), static_cast<size_t>(whole->o.bytes)),
        0);
    EXPECT_EQ(whole->lse.has_value(), result->lse.has_value());
  }
}

TEST(ChunkedClient, LargeCallsAreStripedAutomatically) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  for (const int connections : {1, 3, 8}) {
    const auto client = Connect(server.address(), connections);
    const AttentionCall call = RandomCall("B1,H4,L8192,D64", 7);  // 8 MiB per tensor
    const CallOutcome outcome = Wait(*client, call, {});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.ToString();
    EXPECT_EQ(outcome.result.transport, "chunked");
    EXPECT_EQ(outcome.payload_bytes, 8 << 20);
    EXPECT_TRUE(IsV(outcome.result.o, call));
    CallOptions options;
    options.payload = Payload::kDiscard;
    const CallOutcome dropped = Wait(*client, call, options);
    EXPECT_TRUE(dropped.status.ok());
    EXPECT_EQ(dropped.payload_bytes, 8 << 20);
    EXPECT_EQ(dropped.result.o.data, nullptr);
    options.transport = CallTransport::kInline;
    EXPECT_EQ(Wait(*client, call, options).result.transport, "inline");
  }
  WaitUntilEmpty(server);
}

TEST(ChunkedClient, CallsTooLargeForOneMessageAreSentInChunks) {
  TestServer server([](Config& config) { config.max_request_bytes = 1 << 20; });
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 2);
  for (const char* text : {"B1,H4,L1024,D64", "B1,H4,L1024,D64,layout=blhd,dtype=float32"}) {
    const AttentionCall call = RandomCall(text, 7);  // 3 MiB, far below where chunks begin
    const Result<AttentionResult> result = client->Call(call);
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    EXPECT_EQ(result->transport, "chunked");
    EXPECT_TRUE(IsV(result->o, call));
  }
  EXPECT_EQ(client->Call(RandomCall("B1,H1,L16,D64", 7))->transport, "inline");
  WaitUntilEmpty(server);
}

TEST(ChunkedClient, ManyThreadsCanCallAtOnce) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 3);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 5; ++i) {
        const AttentionCall call = RandomCall("B1,H2,L8192,D64", 10 * t + i + 1);
        const Result<AttentionResult> result = client->Call(call, Chunked());
        ASSERT_TRUE(result.ok()) << result.status().ToString();
        EXPECT_TRUE(IsV(result->o, call));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  WaitUntilEmpty(server);
}

TEST(ChunkedClient, BorrowedMemoryIsFreeAfterTheCall) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 2);
  for (int round = 0; round < 10; ++round) {
    const AttentionCall owned = RandomCall("B1,H2,L8192,D64", static_cast<uint64_t>(round + 1));
    AttentionCall call = owned;
    std::vector<std::vector<std::byte>> memory;
    for (TensorRef* tensor : {&call.q, &call.k, &call.v}) {
      const auto* data = static_cast<const std::byte*>(tensor->data);
      memory.emplace_back(data, data + tensor->bytes);
      *tensor = TensorRef(tensor->dtype, tensor->shape, memory.back().data(), tensor->bytes);
    }
    CallOptions options = Chunked();
    if (round % 2 == 1) options.timeout = milliseconds(2 * round);  // possibly in the middle
    const Result<AttentionResult> result = client->Call(call, options);
    memory.clear();  // AddressSanitizer detects a later read
    if (result.ok()) {
      EXPECT_TRUE(IsV(result->o, owned));
    } else {
      EXPECT_TRUE(IsTooLate(result.status())) << result.status().ToString();
    }
    EXPECT_TRUE(result.ok() || round % 2 == 1);
  }
  AttentionCall call = RandomCall("B1,H2,L300,D64", 1);
  call.k.owner = nullptr;
  EXPECT_THAT(Wait(*client, call, Chunked()).status.message(), HasSubstr("owner"));
  WaitUntilEmpty(server);
}

TEST(ChunkedClient, RetriesWhenMemoryWasFull) {
  TestServer server([](Config& config) { config.memory_budget_bytes = 600 << 10; });
  server.backend().Hold();
  const auto client = Connect(server.address(), 2, 1000);
  const AttentionCall call = RandomCall("B1,H1,L400,D64", 1);  // 400 KiB with its answer
  std::promise<CallOutcome> first;
  client->CallAsync(call, Chunked(), [&](CallOutcome o) { first.set_value(std::move(o)); });
  server.backend().WaitForWaiting(1);
  std::promise<CallOutcome> second;
  client->CallAsync(call, Chunked(), [&](CallOutcome o) { second.set_value(std::move(o)); });
  const auto refused = [&] { return server.log().find("code=\"RESOURCE_EXHAUSTED\""); };
  while (refused() == std::string::npos) std::this_thread::yield();
  server.backend().Release();
  EXPECT_TRUE(first.get_future().get().status.ok());
  const CallOutcome outcome = second.get_future().get();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.ToString();
  EXPECT_GE(outcome.attempts, 2);
  const Result<RowsReport> report = VerifyAnswer(call, outcome.result, 1);
  EXPECT_TRUE(report.ok() && report->ok);
}

TEST(ChunkedClient, RefusalsHaveTheServersMessage) {
  TestServer server;
  const auto client = Connect(server.address(), 4);
  AttentionCall call = RandomCall("B1,H4,L8192,D64", 1);
  call.softcap = -1;
  const CallOutcome outcome = Wait(*client, call, Chunked());
  EXPECT_EQ(outcome.status.code(), Code::kInvalidArgument);
  EXPECT_THAT(outcome.status.message(), HasSubstr("softcap"));
  EXPECT_EQ(outcome.attempts, 1);
}

TEST(ChunkedClient, ADeadlineAtAnyMomentEndsTheCall) {
  ATTEND_FRESH_SEED(seed);
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 4);
  const AttentionCall call = RandomCall("B1,H4,L8192,D64", 1);
  Random random(seed);
  for (int round = 0; round < 10; ++round) {
    CallOptions options = Chunked();
    options.timeout = std::chrono::microseconds(1 + random.Below(40000));
    const CallOutcome outcome = Wait(*client, call, options);
    EXPECT_TRUE(outcome.status.ok() || IsTooLate(outcome.status)) << outcome.status.ToString();
    EXPECT_TRUE(!outcome.status.ok() || IsV(outcome.result.o, call));
  }
  WaitUntilEmpty(server);
}

TEST(ChunkedClient, ClosingTheClientCancelsCalls) {
  TestServer server;
  server.backend().Hold();
  auto client = Connect(server.address(), 3);
  std::promise<CallOutcome> promise;
  client->CallAsync(RandomCall("B1,H1,L400,D64", 1), Chunked(),
                    [&](CallOutcome outcome) { promise.set_value(std::move(outcome)); });
  server.backend().WaitForWaiting(1);
  client->Close();
  EXPECT_EQ(promise.get_future().get().status.code(), Code::kCancelled);
  client.reset();
  server.backend().Release();
  WaitUntilEmpty(server);
}

// Servers that violate the protocol.

// For more see tests/client/wire/chunk_codec_test.cc.
TEST(ChunkedClient, InconsistentAnswersAreErrors) {
  FakeServer server;
  const auto client = Connect(server.address(), 2);
  const AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
  using Messages = std::vector<v1::AttendChunkedResponse>;
  const std::pair<Messages, const char*> cases[] = {
      {{Grant(), Header({1, 1, 4, 8}), Data(5, 0, 127)}, "before the whole answer had arrived"},
      {{Grant(), Header({1, 1, 4, 8}), Data(5, 1, 128)}, "not within the tensor's 128"},
      {{Grant(), v1::AttendChunkedResponse()}, "neither grant nor response nor data"},
  };
  for (const auto& [messages, told] : cases) {
    server.SetChunked(
        [&messages = messages](grpc::ServerContext*, FakeServer::ChunkedStream* stream) {
          v1::AttendChunkedRequest request;
          stream->Read(&request);
          for (const auto& message : messages) stream->Write(message);
          return grpc::Status::OK;
        });
    const CallOutcome outcome = Wait(*client, call, Chunked());
    EXPECT_EQ(outcome.status.code(), Code::kInternal) << told;
    EXPECT_THAT(outcome.status.message(), HasSubstr(told));
  }
}

TEST(ChunkedClient, ALostStreamIsRetried) {
  FakeServer server;
  const auto client = Connect(server.address(), 2);
  const AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
  std::atomic<int> streams{0};
  server.SetChunked([&](grpc::ServerContext*, FakeServer::ChunkedStream* stream) {
    v1::AttendChunkedRequest request;
    stream->Read(&request);
    stream->Write(Grant());
    if (++streams < 3) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost");
    for (int64_t bytes = 0; bytes < 3 * 128; bytes += request.data().size()) {
      if (!stream->Read(&request)) return grpc::Status(grpc::StatusCode::INTERNAL, "cut short");
    }
    stream->Write(Data(5, 28, 100));  // before the header, as from another stream
    stream->Write(Header({1, 1, 4, 8}));
    stream->Write(Data(5, 0, 28));
    return grpc::Status::OK;
  });
  const CallOutcome outcome = Wait(*client, call, Chunked());
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.ToString();
  EXPECT_EQ(outcome.attempts, 3);
  for (int64_t i = 0; i < 128; ++i) EXPECT_EQ(outcome.result.o.data[i], std::byte{1});
}

}  // namespace
}  // namespace attend::client
