// SPDX-License-Identifier: Apache-2.0
//
// Calls that a server refuses: which are retried, and which are not even sent.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "tests/client/support/chunked_calls.h"
#include "tests/kernels/support/manual_clock.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

TEST(Refusals, RetriesRefusalsWithinItsAttempts) {
  FakeServer server;
  server.SetBefore([](int64_t number, grpc::ServerContext* context) {
    if (number >= 3) return grpc::Status::OK;
    if (number > 0) context->AddTrailingMetadata("grpc-retry-pushback-ms", "1");
    return grpc::Status(number == 0 ? grpc::UNAVAILABLE : grpc::RESOURCE_EXHAUSTED, "full");
  });
  const auto client = Connect(server.address(), 1);
  const CallOutcome outcome = Wait(*client, RandomCall("B1,H2,L300,D64", 1), {});
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.ToString();
  EXPECT_EQ(outcome.attempts, 4);
  EXPECT_EQ(server.calls(), 4);
}

TEST(Refusals, ADeadlineBeyondTheClocksEndIsNone) {
  FakeServer server;
  server.SetBefore([](int64_t number, grpc::ServerContext*) {
    return number < 2 ? grpc::Status(grpc::UNAVAILABLE, "starting") : grpc::Status::OK;
  });
  const auto client = Connect(server.address(), 1);
  CallOptions options;
  options.timeout = std::chrono::nanoseconds::max();
  const CallOutcome outcome = Wait(*client, RandomCall("B1,H1,L4,D8", 1), options);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.ToString();
  EXPECT_EQ(outcome.attempts, 3);
}

TEST(Refusals, TextThatIsNotUtf8IsNotSent) {
  FakeServer server;
  const auto client = Connect(server.address(), 1);
  for (const CallTransport transport : {CallTransport::kInline, CallTransport::kChunked}) {
    CallOptions options;
    options.transport = transport;
    AttentionCall call = RandomCall("B1,H1,L4,D8", 1);
    call.request_id = "a\xff";
    EXPECT_THAT(Wait(*client, call, options).status.message(),
                HasSubstr("request_id is \"a\xff\", must be UTF-8"));
    call.request_id = "";
    call.kernel = "\xc3";
    EXPECT_THAT(Wait(*client, call, options).status.message(), HasSubstr("kernel is \"\xc3\""));
  }
  EXPECT_EQ(server.calls(), 0);
}

TEST(Refusals, GivesUpAfterItsAttempts) {
  FakeServer server;
  server.SetBefore([](int64_t, grpc::ServerContext* context) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms", "1");
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "queue of 8 is full");
  });
  const auto client = Connect(server.address(), 1, 3);
  const CallOutcome outcome = Wait(*client, RandomCall("B1,H1,L4,D8", 1), {});
  EXPECT_EQ(outcome.status.code(), Code::kResourceExhausted);
  EXPECT_EQ(outcome.status.message(), "queue of 8 is full");
  EXPECT_EQ(outcome.attempts, 3);
  EXPECT_EQ(server.calls(), 3);
}

TEST(Refusals, ARefusalWithoutARetryHintIsFinal) {
  FakeServer server;
  const auto full = [](grpc::ServerContext*) {
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "too large for ever");
  };
  server.SetBefore([&](int64_t, grpc::ServerContext* context) { return full(context); });
  server.SetChunked(
      [&](grpc::ServerContext* context, FakeServer::ChunkedStream*) { return full(context); });
  const auto client = Connect(server.address(), 1);
  int64_t calls = 0;
  for (const CallTransport transport : {CallTransport::kInline, CallTransport::kChunked}) {
    CallOptions options;
    options.transport = transport;
    const CallOutcome outcome = Wait(*client, RandomCall("B1,H1,L4,D8", 1), options);
    EXPECT_EQ(outcome.status.code(), Code::kResourceExhausted);
    EXPECT_EQ(outcome.attempts, 1);
    EXPECT_EQ(server.calls(), ++calls);
  }
}

TEST(Refusals, AMessageThatGrpcRefusesAsTooLargeIsSentOnce) {
  FakeServer server(/*receive_bytes_max=*/1 << 20);
  const auto client = Connect(server.address(), 1);
  // The limits are unknown until they are requested, which CallAsync does not do.
  CallOptions options;
  options.transport = CallTransport::kInline;
  const CallOutcome outcome = Wait(*client, RandomCall("B1,H1,L8192,D64", 1), options);
  EXPECT_EQ(outcome.status.code(), Code::kResourceExhausted) << outcome.status.ToString();
  EXPECT_EQ(outcome.attempts, 1);
}

TEST(Refusals, ARequestAboveTheServersLimitsIsNotSent) {
  FakeServer server;
  server.SetRequestBytesMax(1 << 20);
  const AttentionCall small = RandomCall("B1,H1,L4,D8", 1);
  const AttentionCall large = RandomCall("B1,H1,L2048,D64", 1);                  // 1.5 MiB
  const AttentionCall large_answer = RandomCall("B1,H1,Lq9000,Lk1,D1,Dv64", 1);  // of 2.2 MiB
  const auto client = Connect(server.address(), 1);
  CallOptions options;
  options.transport = CallTransport::kInline;
  for (const AttentionCall* call : {&large, &large_answer}) {
    const Status refused = client->Call(*call, options).status();
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.message(), HasSubstr("at most 1048576"));
    EXPECT_EQ(Wait(*client, *call, options).status.code(), Code::kInvalidArgument);
    const auto encoded = std::make_shared<const EncodedCall>(*EncodedCall::Make(*call));
    std::promise<CallOutcome> outcome;
    client->CallAsync(encoded, "", options,
                      [&](CallOutcome ended) { outcome.set_value(std::move(ended)); });
    EXPECT_EQ(outcome.get_future().get().status.code(), Code::kInvalidArgument);
  }
  // A stream refuses only this request; gRPC would end the whole stream.
  const auto stream = client->OpenStream();
  std::atomic<int> refused = 0, answered = 0;
  for (const AttentionCall* call : {&small, &large, &small}) {
    stream->Send(*call, [&](StreamAnswer answer) {
      answered += answer.status.ok();
      refused += answer.status.code() == Code::kInvalidArgument;
    });
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered, 2);
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(server.calls(), 2) << "only the small ones came";
}

TEST(Refusals, WithoutLimitsCallsAreSent) {
  FakeServer server;
  server.SetInfo(grpc::Status(grpc::UNIMPLEMENTED, "an older server"));
  const auto client = Connect(server.address(), 1);
  EXPECT_TRUE(client->Call(RandomCall("B1,H1,L256,D64", 1)).ok());
  EXPECT_TRUE(client->Call(RandomCall("B1,H1,L256,D64", 1)).ok());
  EXPECT_EQ(server.infos(), 1) << "asked once";
}

TEST(Refusals, PushbackIsHonoured) {
  FakeServer server;
  std::string pushback = "-1";
  server.SetBefore([&](int64_t, grpc::ServerContext* context) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms", pushback);
    return grpc::Status(grpc::UNAVAILABLE, "draining");
  });
  const auto client = Connect(server.address(), 1);
  EXPECT_EQ(client->Call(RandomCall("B1,H1,L4,D8", 1)).status().code(), Code::kUnavailable);
  EXPECT_EQ(server.calls(), 1) << "a negative pushback forbids it";
  pushback = "3600000";
  CallOptions options;
  options.timeout = seconds(30);
  EXPECT_EQ(client->Call(RandomCall("B1,H1,L4,D8", 1), options).status().code(),
            Code::kUnavailable);
  EXPECT_EQ(server.calls(), 2) << "an hour does not fit the deadline";
}

TEST(Refusals, ARefusalAfterTheDeadlineIsNotRetried) {
  test::ManualClock clock;
  CallOptions options;
  options.timeout = std::chrono::hours(1);  // in real time gRPC does not end it
  std::chrono::nanoseconds passes = options.timeout;
  const auto late = [&](grpc::ServerContext*) {
    clock.Advance(passes);
    return grpc::Status(grpc::UNAVAILABLE, "too late");
  };
  FakeServer server;
  server.SetBefore([&](int64_t, grpc::ServerContext* context) { return late(context); });
  server.SetChunked(
      [&](grpc::ServerContext* context, FakeServer::ChunkedStream*) { return late(context); });
  ClientOptions client_options;
  client_options.server = server.address();
  client_options.retry.attempts_max = 4;
  client_options.retry.backoff_initial = milliseconds(1);
  client_options.clock = &clock;
  const std::unique_ptr<Client> client = *Client::Make(client_options);
  int64_t calls = 0;
  for (const CallTransport transport : {CallTransport::kInline, CallTransport::kChunked}) {
    options.transport = transport;
    // The second attempt comes after half of the time, the third would come after all of it.
    for (const int attempts : {1, 2}) {
      passes = options.timeout / attempts;
      const CallOutcome outcome = Wait(*client, RandomCall("B1,H1,L4,D8", 1), options);
      EXPECT_EQ(outcome.status.code(), Code::kUnavailable) << outcome.status.ToString();
      EXPECT_EQ(outcome.attempts, attempts);
      EXPECT_EQ(server.calls(), calls += attempts);
    }
  }
}

TEST(Refusals, ACancellationEndsTheWaitForARetry) {
  FakeServer server;
  std::promise<void> refused;
  server.SetBefore([&](int64_t, grpc::ServerContext* context) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms", "3600000");
    refused.set_value();
    return grpc::Status(grpc::UNAVAILABLE, "later");
  });
  const auto client = Connect(server.address(), 1);
  std::promise<CallOutcome> promise;
  CallHandle handle = client->CallAsync(RandomCall("B1,H1,L4,D8", 1), {}, [&](CallOutcome outcome) {
    promise.set_value(std::move(outcome));
  });
  refused.get_future().wait();
  handle.Cancel();
  EXPECT_EQ(promise.get_future().get().status.code(), Code::kCancelled);
}

}  // namespace
}  // namespace attend::client
