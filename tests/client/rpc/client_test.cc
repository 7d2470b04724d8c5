// SPDX-License-Identifier: Apache-2.0
//
// The client against a real gRPC server in this process.

#include "client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "client/tool/call_spec.h"
#include "client/tool/verify.h"
#include "tests/client/support/fake_server.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

std::unique_ptr<Client> Connect(const FakeServer& server, int connections = 1, int attempts = 5) {
  ClientOptions options;
  options.server = server.address();
  options.connections = connections;
  options.retry.attempts_max = attempts;
  options.retry.backoff_initial = milliseconds(1);
  Result<std::unique_ptr<Client>> client = Client::Make(options);
  EXPECT_TRUE(client.ok()) << client.status().ToString();
  return std::move(*client);
}

AttentionCall RandomCall(const char* text, uint64_t seed) {
  return *MakeRandomCall(*ParseCallSpec(text), seed);
}

CallOutcome Wait(Client& client, const AttentionCall& call, const CallOptions& options = {}) {
  std::promise<CallOutcome> promise;
  client.CallAsync(call, options,
                   [&](CallOutcome outcome) { promise.set_value(std::move(outcome)); });
  return promise.get_future().get();
}

TEST(Client, AnswersAreRight) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  const auto client = Connect(server);
  for (const char* text :
       {"B1,H1,L4,D8", "B2,H4,Hkv2,Lq9,Lk33,D64,causal,lse", "B1,H2,L200,D64,dtype=float16,lse",
        "B3,H2,L20,D16,layout=lhd,ragged,bias,alibi,sinks,softcap=8,dtype=bfloat16,lse",
        "B1,H1,Lq0,Lk5,D8,lse", "B1,H1,Lq5,Lk0,D8,lse"}) {
    AttentionCall call = RandomCall(text, seed);
    call.request_id = "mine";
    call.check = true;
    const Result<AttentionResult> result = client->Call(call);
    ASSERT_TRUE(result.ok()) << text << ": " << result.status().ToString();
    EXPECT_EQ(result->request_id, "mine");
    EXPECT_EQ(result->kernel, "cpu_reference");
    EXPECT_EQ(result->timings.total_ns, 2000);
    ASSERT_TRUE(result->check);
    EXPECT_TRUE(result->check->ok);
    const Result<RowsReport> report = VerifyAnswer(call, *result, seed);
    ASSERT_TRUE(report.ok()) << text << ": " << report.status().ToString();
    EXPECT_TRUE(report->ok) << text << ": " << report->detail;
  }
}

TEST(Client, VerificationCatchesAWrongAnswer) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  const auto client = Connect(server);
  const AttentionCall call = RandomCall("B1,H2,L20,D8", seed);
  for (const uint32_t fault : {0x7fc00000u, 0x40400000u}) {  // NaN, 3.0
    server.SetAfter([fault, seed](v1::AttendResponse* response) {
      const size_t at = 4 * (seed % (response->raw(0).size() / 4));
      std::memcpy(response->mutable_raw(0)->data() + at, &fault, 4);
    });
    const Result<AttentionResult> result = client->Call(call);
    ASSERT_TRUE(result.ok());
    const Result<RowsReport> report = VerifyAnswer(call, *result, seed);
    ASSERT_TRUE(report.ok());
    EXPECT_FALSE(report->ok);
  }
  server.SetAfter([](v1::AttendResponse* response) { response->mutable_raw(0)->pop_back(); });
  EXPECT_EQ(client->Call(call).status().code(), Code::kInternal);
}

TEST(Client, BorrowedMemoryIsFreeAfterTheCall) {
  FakeServer server;
  const auto client = Connect(server);
  for (int round = 0; round < 10; ++round) {
    const AttentionCall owned = RandomCall("B1,H2,L100,D64", static_cast<uint64_t>(round + 1));
    AttentionCall call = owned;
    std::vector<std::vector<std::byte>> memory;
    for (TensorRef* tensor : {&call.q, &call.k, &call.v}) {
      const auto* data = static_cast<const std::byte*>(tensor->data);
      memory.emplace_back(data, data + tensor->bytes);
      *tensor = TensorRef(tensor->dtype, tensor->shape, memory.back().data(), tensor->bytes);
    }
    const Result<AttentionResult> result = client->Call(call);
    memory.clear();  // AddressSanitizer detects a later read
    ASSERT_TRUE(result.ok());
    EXPECT_TRUE(VerifyAnswer(owned, *result, 1)->ok);
  }
}

TEST(Client, AsynchronousCallsNeedOwners) {
  FakeServer server;
  const auto client = Connect(server);
  AttentionCall call = RandomCall("B1,H2,L300,D64", 1);
  call.k.owner = nullptr;
  const CallOutcome outcome = Wait(*client, call);
  EXPECT_EQ(outcome.status.code(), Code::kInvalidArgument);
  EXPECT_THAT(outcome.status.message(), HasSubstr("owner"));
  EXPECT_EQ(server.calls(), 0);
}

TEST(Client, ReturnsTheServersStatus) {
  FakeServer server;
  server.SetBefore([](int64_t, grpc::ServerContext*) {
    return grpc::Status(grpc::INVALID_ARGUMENT, "q: shape [1] has 1 dimension");
  });
  const auto client = Connect(server);
  const Status status = client->Call(RandomCall("B1,H1,L4,D8", 1)).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "q: shape [1] has 1 dimension");
  EXPECT_EQ(server.calls(), 1) << "not a failure to try again";
}

TEST(Client, AnAnswerOfTheWrongSizeIsAnError) {
  FakeServer server;
  server.SetAfter([](v1::AttendResponse* response) {
    response->mutable_o()->set_shape(2, 5);  // of 4 rows
    response->mutable_raw(0)->append(8 * sizeof(float), '\0');
  });
  const auto client = Connect(server);
  AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
  const Status status = client->Call(call).status();
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_EQ(status.message(), "the server's answer has an o of 160 bytes, the request's has 128");
}

TEST(Client, AnUnrequestedLseIsAnError) {
  FakeServer server;
  const auto client = Connect(server);
  const AttentionCall with = RandomCall("B1,H1,L4,D8,lse", 1);
  const AttentionCall without = RandomCall("B1,H1,L4,D8", 1);
  const auto expect = [&](const AttentionCall& call, const char* message) {
    const Status status = client->Call(call).status();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_EQ(status.message(), message);
  };
  server.SetAfter([](v1::AttendResponse* response) {
    response->mutable_lse()->set_shape(2, 5);  // of 4 rows
    response->mutable_raw(1)->append(sizeof(float), '\0');
  });
  expect(with, "the server's answer has an lse of 20 bytes, the request's has 16");
  server.SetAfter([](v1::AttendResponse* response) {
    response->clear_lse();
    response->mutable_raw()->RemoveLast();
  });
  expect(with, "the server's answer has no lse, but one was requested");
  server.SetAfter([](v1::AttendResponse* response) {
    *response->mutable_lse() = response->o();
    response->add_raw(response->raw(0));
  });
  expect(without, "the server's answer has an lse, but none was requested");
}

TEST(Client, ADeadlineEndsTheCall) {
  FakeServer server;
  server.SetBefore(
      [&](int64_t, grpc::ServerContext* context) { return server.UntilCancelled(context); });
  const auto client = Connect(server);
  CallOptions options;
  options.timeout = milliseconds(30);
  EXPECT_EQ(client->Call(RandomCall("B1,H2,L300,D64", 1), options).status().code(),
            Code::kDeadlineExceeded);
}

TEST(Client, ACancellationEndsTheCallOnBothSides) {
  FakeServer server;
  std::promise<void> arrived;
  server.SetBefore([&](int64_t, grpc::ServerContext* context) {
    arrived.set_value();
    return server.UntilCancelled(context);
  });
  {
    const auto client = Connect(server);
    std::promise<CallOutcome> promise;
    CallHandle handle =
        client->CallAsync(RandomCall("B1,H2,L300,D64", 1), {},
                          [&](CallOutcome outcome) { promise.set_value(std::move(outcome)); });
    arrived.get_future().wait();
    handle.Cancel();
    EXPECT_EQ(promise.get_future().get().status.code(), Code::kCancelled);
    handle.Cancel();  // afterwards it does nothing
  }
  server.Stop();
  EXPECT_EQ(server.cancelled(), 1);
}

TEST(Client, DestructionCancelsCallsInFlight) {
  FakeServer server;
  server.SetBefore(
      [&](int64_t, grpc::ServerContext* context) { return server.UntilCancelled(context); });
  std::atomic<int> cancelled{0};
  {
    const auto client = Connect(server, 3);
    for (int i = 0; i < 10; ++i) {
      client->CallAsync(RandomCall("B1,H1,L4,D8", 1), {}, [&](CallOutcome outcome) {
        cancelled += outcome.status.code() == Code::kCancelled;
      });
    }
  }
  EXPECT_EQ(cancelled, 10) << "every callback has run when the destructor returns";
}

TEST(Client, UsesEveryConnection) {
  for (const int connections : {1, 2, 5}) {
    FakeServer server;
    const auto client = Connect(server, connections);
    EXPECT_EQ(client->connections(), connections);
    const AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
    std::vector<int> used(static_cast<size_t>(connections), 0);
    for (int i = 0; i < 10 * connections; ++i) ++used[Wait(*client, call).connection];
    EXPECT_EQ(server.peers().size(), static_cast<size_t>(connections)) << "each its own socket";
    for (const int count : used) EXPECT_EQ(count, 10) << "in turn when all are idle";
  }
}

TEST(Client, PrefersConnectionsWithFewerCalls) {
  FakeServer server;
  std::atomic<bool> hold{true};
  std::atomic<int> held{0};
  server.SetBefore([&](int64_t number, grpc::ServerContext*) {
    if (number == 0) {
      ++held;
      while (hold) std::this_thread::sleep_for(milliseconds(1));
    }
    return grpc::Status::OK;
  });
  const auto client = Connect(server, 2);
  const AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
  std::promise<CallOutcome> slow;
  client->CallAsync(call, {}, [&](CallOutcome outcome) { slow.set_value(std::move(outcome)); });
  while (held == 0) std::this_thread::sleep_for(milliseconds(1));
  std::set<int> used;
  for (int i = 0; i < 10; ++i) used.insert(Wait(*client, call).connection);
  hold = false;
  const CallOutcome outcome = slow.get_future().get();
  EXPECT_EQ(used.size(), 1u);
  EXPECT_FALSE(used.contains(outcome.connection));
}

TEST(Client, ManyThreadsCanCallAtOnce) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  const auto client = Connect(server, 3);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const AttentionCall call = RandomCall("B1,H2,L40,D16,causal,lse", seed + t);
      for (int i = 0; i < 25; ++i) {
        const Result<AttentionResult> result = client->Call(call);
        right += result.ok() && VerifyAnswer(call, *result, 1)->ok;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 100);
}

TEST(Client, AMissingServerIsUnavailable) {
  ClientOptions options;
  options.server = "127.0.0.1:1";
  options.retry.attempts_max = 2;
  options.retry.backoff_initial = milliseconds(1);
  const auto client = Client::Make(options).value();
  EXPECT_EQ(client->Call(RandomCall("B1,H1,L4,D8", 1)).status().code(), Code::kUnavailable);
  EXPECT_EQ(client->GetServerInfo(seconds(5)).status().code(), Code::kUnavailable);
  EXPECT_EQ(client->CheckHealth("", seconds(5)).status().code(), Code::kUnavailable);
}

TEST(Client, ReturnsInfoAndHealth) {
  FakeServer server;
  const auto client = Connect(server);
  const auto info = client->GetServerInfo(seconds(10));
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->version(), "fake");
  const Result<Health> health = client->CheckHealth("", seconds(10));
  ASSERT_TRUE(health.ok()) << health.status().ToString();
  EXPECT_EQ(*health, Health::kServing);
  const Result<Health> service = client->CheckHealth("attend.v1.AttentionService", seconds(10));
  ASSERT_TRUE(service.ok()) << service.status().ToString();
  EXPECT_EQ(*service, Health::kServing);
  EXPECT_EQ(client->CheckHealth(std::string(150, 'x'), seconds(10)).status().code(),
            Code::kNotFound);
}

TEST(Client, RefusesOptionsOutOfBounds) {
  const auto refused = [](const std::function<void(ClientOptions&)>& spoil) {
    ClientOptions options;
    spoil(options);
    return Client::Make(options).status().code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](auto& o) { o.server = ""; }));
  EXPECT_TRUE(refused([](auto& o) { o.connections = 0; }));
  EXPECT_TRUE(refused([](auto& o) { o.connections = 1025; }));
  EXPECT_TRUE(refused([](auto& o) { o.completion_threads = -1; }));
  EXPECT_TRUE(refused([](auto& o) { o.message_bytes_max = -1; }));
  EXPECT_TRUE(refused([](auto& o) { o.retry.attempts_max = 0; }));
}

TEST(Client, SendsTheTenant) {
  FakeServer server;
  std::mutex mutex;
  std::multiset<std::string> named;
  const auto note = [&](grpc::ServerContext* context) {
    const auto found = context->client_metadata().find("x-attend-tenant");
    const std::lock_guard lock(mutex);
    named.insert(found == context->client_metadata().end()
                     ? "unknown"
                     : std::string(found->second.data(), found->second.size()));
    return grpc::Status(grpc::StatusCode::INTERNAL, "noted");
  };
  server.SetBefore([&](int64_t, grpc::ServerContext* context) { return note(context); });
  server.SetChunked(
      [&](grpc::ServerContext* context, FakeServer::ChunkedStream*) { return note(context); });
  const auto client = Connect(server);
  const AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
  CallOptions options;
  EXPECT_EQ(Wait(*client, call, options).status.message(), "noted");
  options.tenant = "unary";
  EXPECT_EQ(Wait(*client, call, options).status.message(), "noted");
  options.tenant = "chunked";
  options.transport = CallTransport::kChunked;
  EXPECT_EQ(Wait(*client, call, options).status.message(), "noted");
  StreamOptions stream_options;
  stream_options.tenant = "stream";
  const auto stream = client->OpenStream(stream_options);
  stream->Send(call, [](StreamAnswer) {});
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(named, (std::multiset<std::string>{"unknown", "unary", "chunked", "stream"}));

  for (const std::string& bad : {std::string("a\nb"), std::string("\xff"), std::string(257, 'a')}) {
    options.tenant = stream_options.tenant = bad;
    EXPECT_EQ(Wait(*client, call, options).status.code(), Code::kInvalidArgument);
    EXPECT_EQ(client->Call(call, options).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(client->OpenStream(stream_options)->Finish().code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(named.size(), 4U);
}

}  // namespace
}  // namespace attend::client
