// SPDX-License-Identifier: Apache-2.0
//
// Streams against a real gRPC server in this process.

#include "client/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "client/call/server_address.h"
#include "client/client.h"
#include "client/rpc/connections.h"
#include "client/rpc/stream_op.h"
#include "client/tool/call_spec.h"
#include "client/tool/verify.h"
#include "tests/client/support/fake_server.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<Client> Connect(const FakeServer& server, int connections = 1) {
  ClientOptions options;
  options.server = server.address();
  options.connections = connections;
  return Client::Make(options).value();
}

// Collects answers in order of sending.
class Answers {
 public:
  StreamCallback Take(int index) {
    return [this, index](StreamAnswer answer) {
      const std::lock_guard lock(mutex_);
      ++taken_[index];
      answers_[index] = std::move(answer);
      order_.push_back(index);
    };
  }
  StreamAnswer& at(int index) { return answers_.at(index); }
  const std::vector<int>& order() const { return order_; }
  bool EachOnce(int count) {
    const std::lock_guard lock(mutex_);
    if (static_cast<int>(taken_.size()) != count) return false;
    for (const auto& [index, times] : taken_) {
      if (times != 1) return false;
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> taken_;
  std::map<int, StreamAnswer> answers_;
  std::vector<int> order_;
};

TEST(Stream, AnswersOutOfOrderReachTheirRequests) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  server.SetStreamBatch(5);  // answered last first
  const auto client = Connect(server);
  Answers answers;
  std::vector<AttentionCall> calls;
  for (int i = 0; i < 23; ++i) {
    const std::string text = "B1,H2,L" + std::to_string(3 + i * 7) + ",D64,causal,lse";
    calls.push_back(*MakeRandomCall(*ParseCallSpec(text), seed + i));
  }
  const auto stream = client->OpenStream();
  for (int i = 0; i < 23; ++i) stream->Send(calls[i], answers.Take(i));
  const Status finished = stream->Finish();
  EXPECT_TRUE(finished.ok()) << finished.ToString();
  ASSERT_TRUE(answers.EachOnce(23));
  EXPECT_FALSE(std::is_sorted(answers.order().begin(), answers.order().end()));
  for (int i = 0; i < 23; ++i) {
    ASSERT_TRUE(answers.at(i).status.ok()) << answers.at(i).status.ToString();
    const Result<RowsReport> report = VerifyAnswer(calls[i], answers.at(i).result, 1);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_TRUE(report->ok) << report->detail;
  }
}

TEST(Stream, OneBadRequestFailsAlone) {
  FakeServer server;
  server.SetBefore([](int64_t number, grpc::ServerContext*) {
    return number == 1 ? grpc::Status(grpc::RESOURCE_EXHAUSTED, "full") : grpc::Status::OK;
  });
  const auto client = Connect(server);
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1);
  Answers answers;
  const auto stream = client->OpenStream();
  for (int i = 0; i < 3; ++i) stream->Send(call, answers.Take(i));
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_TRUE(answers.EachOnce(3));
  EXPECT_TRUE(answers.at(0).status.ok());
  EXPECT_EQ(answers.at(1).status.code(), Code::kResourceExhausted);
  EXPECT_EQ(answers.at(1).status.message(), "full");
  EXPECT_EQ(answers.at(1).retry_after_ms, 7);
  EXPECT_TRUE(answers.at(2).status.ok());
}

TEST(Stream, RefusesAnIdInFlightAndMemoryWithoutAnOwner) {
  FakeServer server;
  server.SetStreamBatch(100);  // nothing is answered before Finish
  const auto client = Connect(server);
  AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H2,L300,D64"), 1);
  call.request_id = "twice";
  Answers answers;
  const auto stream = client->OpenStream();
  stream->Send(call, answers.Take(0));
  stream->Send(call, answers.Take(1));
  EXPECT_EQ(answers.at(1).status.code(), Code::kInvalidArgument);
  EXPECT_THAT(answers.at(1).status.message(), HasSubstr("\"twice\""));
  call.q.owner = nullptr;
  stream->Send(call, answers.Take(2));
  EXPECT_EQ(answers.at(2).status.code(), Code::kInvalidArgument);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(answers.at(0).status.ok());
  stream->Send(call, answers.Take(3));
  EXPECT_FALSE(answers.at(3).status.ok()) << "nothing is sent after Finish";
  EXPECT_TRUE(answers.EachOnce(4));
}

TEST(Stream, DestructionCancelsRequestsInFlight) {
  FakeServer server;
  server.SetStreamBatch(100);
  const auto client = Connect(server);
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H2,L300,D64"), 1);
  Answers answers;
  {
    const auto stream = client->OpenStream();
    for (int i = 0; i < 10; ++i) stream->Send(call, answers.Take(i));
  }
  ASSERT_TRUE(answers.EachOnce(10));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(answers.at(i).status.code(), Code::kCancelled);
}

TEST(Stream, ARequestCanBeCancelledAlone) {
  FakeServer server;
  server.SetStreamBatch(3);  // answers nothing before it has all
  const auto client = Connect(server);
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H2,L300,D64"), 1);
  const auto stream = client->OpenStream();
  std::promise<StreamAnswer> kept[2], cancelled;
  stream->Send(call, [&](StreamAnswer answer) { kept[0].set_value(std::move(answer)); });
  CallHandle handle =
      stream->Send(call, [&](StreamAnswer answer) { cancelled.set_value(std::move(answer)); });
  while (server.calls() < 2) std::this_thread::yield();  // both were sent
  handle.Cancel();
  EXPECT_EQ(cancelled.get_future().get().status.code(), Code::kCancelled);
  handle.Cancel();  // has ended
  stream->Send(call, [&](StreamAnswer answer) { kept[1].set_value(std::move(answer)); });
  for (auto& each : kept) {
    const StreamAnswer answer = each.get_future().get();
    EXPECT_TRUE(answer.status.ok()) << answer.status.ToString();
  }
  EXPECT_TRUE(stream->Finish().ok()) << "the answer to it was dropped";
}

TEST(Stream, CancellingALaterRequestDoesNotDelayAnEarlierOne) {
  FakeServer server;
  const auto client = Connect(server);
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1);
  const auto stream = client->OpenStream();
  for (int n = 0; n < 200; ++n) {
    const auto second = std::make_shared<std::promise<void>>();
    stream->Send(call, [](const StreamAnswer&) {});
    stream->Send(call, [second](const StreamAnswer&) { second->set_value(); });
    stream->Send(call, [](const StreamAnswer&) {}).Cancel();
    ASSERT_EQ(second->get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(Stream, AHandleDoesNotCancelALaterRequestWithItsId) {
  FakeServer server;
  server.SetStreamBatch(2);
  const auto client = Connect(server);
  AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1);
  Answers answers;
  std::promise<void> first;
  const auto stream = client->OpenStream();
  stream->Send(call, answers.Take(0));
  call.request_id = "again";
  CallHandle handle = stream->Send(call, [&](const StreamAnswer&) { first.set_value(); });
  first.get_future().wait();
  stream->Send(call, answers.Take(1));
  handle.Cancel();
  // The server answers it together with the next one, which reaches the loop after the handle's
  // cancellation.
  call.request_id = "other";
  stream->Send(call, answers.Take(2));
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_TRUE(answers.EachOnce(3));
  EXPECT_TRUE(answers.at(1).status.ok()) << answers.at(1).status.ToString();
}

// As if the client closed between the stream's registration and its start. Otherwise the client
// would wait for it forever.
TEST(Stream, AStreamCancelledBeforeItStartsEnds) {
  FakeServer server;
  server.SetStreamBatch(100);
  const SteadyClock clock;
  ConnectionPool pool(
      {.target = ServerTarget(server.address()).value(), .tls = nullptr, .completion_threads = 1},
      clock);
  RequestIds ids(1);
  const std::atomic<int64_t> message_bytes_max = 0;
  const auto op = std::make_shared<StreamOp>(&pool, StreamOptions(), &ids, &message_bytes_max);
  op->Cancel();
  op->Start();
  EXPECT_EQ(op->Finish().code(), Code::kCancelled);
  pool.Close();
}

TEST(Stream, ALostServerFailsRequestsInFlight) {
  FakeServer server;
  std::promise<void> arrived;
  server.SetStreamBatch(100);
  server.SetBefore([&](int64_t number, grpc::ServerContext*) {
    if (number == 4) arrived.set_value();
    return grpc::Status::OK;
  });
  const auto client = Connect(server);
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1);
  Answers answers;
  const auto stream = client->OpenStream();
  for (int i = 0; i < 5; ++i) stream->Send(call, answers.Take(i));
  arrived.get_future().wait();
  server.Stop();
  EXPECT_FALSE(stream->Finish().ok());
  ASSERT_TRUE(answers.EachOnce(5));
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(answers.at(i).status.ok());
}

TEST(Stream, AnAnswerWithAnUnknownIdEndsTheStream) {
  FakeServer server;
  server.SetAfter([](v1::AttendResponse* response) { response->set_request_id("other-id"); });
  const auto client = Connect(server);
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1);
  Answers answers;
  const auto stream = client->OpenStream();
  stream->Send(call, answers.Take(0));
  const Status finished = stream->Finish();
  EXPECT_EQ(finished.code(), Code::kInternal);
  EXPECT_THAT(finished.message(), HasSubstr("other-id"));
  ASSERT_TRUE(answers.EachOnce(1));
  EXPECT_EQ(answers.at(0).status.code(), Code::kInternal);
}

// Its tensors match its own header, so the request it belongs to is known.
TEST(Stream, AnAnswerOfTheWrongSizeFailsOnlyItsRequest) {
  FakeServer server;
  server.SetAfter([](v1::AttendResponse* response) {
    if (response->request_id() == "o") {
      response->mutable_o()->set_shape(2, 5);  // of 4 rows
      response->mutable_raw(0)->append(8 * sizeof(float), '\0');
    } else if (response->request_id() == "lse") {
      response->mutable_lse()->set_shape(2, 3);
      response->mutable_raw(1)->resize(3 * sizeof(float));
    }
  });
  const auto client = Connect(server);
  AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8,lse"), 1);
  Answers answers;
  const auto stream = client->OpenStream();
  const std::vector<std::string> names = {"before", "o", "between", "lse", "after"};
  for (size_t i = 0; i < names.size(); ++i) {
    call.request_id = names[i];
    stream->Send(call, answers.Take(static_cast<int>(i)));
  }
  const Status finished = stream->Finish();
  EXPECT_TRUE(finished.ok()) << finished.ToString();
  ASSERT_TRUE(answers.EachOnce(5));
  for (const int i : {0, 2, 4}) {
    EXPECT_TRUE(answers.at(i).status.ok()) << answers.at(i).status.ToString();
  }
  EXPECT_EQ(answers.at(1).status.code(), Code::kInternal);
  EXPECT_EQ(answers.at(1).status.message(),
            "the server's answer has an o of 160 bytes, the request's has 128");
  EXPECT_EQ(answers.at(3).status.code(), Code::kInternal);
  EXPECT_EQ(answers.at(3).status.message(),
            "the server's answer has an lse of 12 bytes, the request's has 16");
}

TEST(Stream, ATimeoutEndsTheStream) {
  FakeServer server;
  server.SetStreamBatch(100);
  const auto client = Connect(server);
  StreamOptions options;
  options.timeout = std::chrono::milliseconds(50);
  Answers answers;
  const auto stream = client->OpenStream(options);
  stream->Send(*MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1), answers.Take(0));
  while (!answers.EachOnce(1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(stream->Finish().code(), Code::kDeadlineExceeded);
}

TEST(Stream, AMissingServerIsUnavailable) {
  ClientOptions client_options;
  client_options.server = "127.0.0.1:1";
  const auto client = Client::Make(client_options).value();
  Answers answers;
  const auto stream = client->OpenStream();
  stream->Send(*MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1), answers.Take(0));
  EXPECT_EQ(stream->Finish().code(), Code::kUnavailable);
  EXPECT_EQ(answers.at(0).status.code(), Code::kUnavailable);
}

TEST(Stream, StreamsUseDifferentConnections) {
  FakeServer server;
  const auto client = Connect(server, 3);
  std::vector<std::unique_ptr<Stream>> streams;
  std::set<int> connections;
  for (int i = 0; i < 3; ++i) {
    streams.push_back(client->OpenStream());
    connections.insert(streams.back()->connection());
  }
  EXPECT_EQ(connections.size(), 3u);
  Answers answers;
  const AttentionCall call = *MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), 1);
  for (int i = 0; i < 3; ++i) streams[i]->Send(call, answers.Take(i));
  for (const auto& stream : streams) EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(server.peers().size(), 3u);
}

}  // namespace
}  // namespace attend::client
