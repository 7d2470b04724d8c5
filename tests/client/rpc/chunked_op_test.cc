// SPDX-License-Identifier: Apache-2.0
//
// Chunked calls whose streams end differently: some do not join, some are lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "client/wire/chunk_codec.h"
#include "tests/client/support/chunked_calls.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

constexpr char kShape[] = "B1,H1,L8192,D64";  // 2 MiB per tensor: enough for two streams
constexpr int64_t kTensorBytes = int64_t{2} << 20;
constexpr int64_t kPieceBytes = int64_t{1} << 20;

// A request that may have two streams. The first one reads nothing after the header until the
// second one has gone, so that only a call that depends on the second one fails.
class TwoStreams {
 public:
  // The second stream does this once its token has been read.
  using Second = std::function<grpc::Status(grpc::ServerContext*, FakeServer::ChunkedStream*)>;

  TwoStreams() {
    server_.SetChunked([this](grpc::ServerContext* context, FakeServer::ChunkedStream* stream) {
      v1::AttendChunkedRequest request;
      stream->Read(&request);
      if (request.has_header()) return First(stream);
      const grpc::Status status = second_(context, stream);
      Gone();
      return status;
    });
  }
  void SetSecond(Second second) {
    const std::lock_guard lock(mutex_);
    second_ = std::move(second);
  }
  // The first stream brings this much of O; the rest is assigned to the second.
  void SetFirstBrings(int64_t bytes) { first_brings_ = bytes; }
  // Bytes of the request that the first one then does not wait for.
  void SecondTook(size_t bytes) { second_took_ += static_cast<int64_t>(bytes); }
  const std::string& address() const { return server_.address(); }
  FakeServer& server() { return server_; }
  // The second stream is no longer awaited.
  void Gone() {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    changed_.notify_all();
  }

 private:
  grpc::Status First(FakeServer::ChunkedStream* stream) {
    stream->Write(Grant(2, kPieceBytes));
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return gone_; });
      gone_ = false;
    }
    v1::AttendChunkedRequest request;
    for (int64_t bytes = second_took_; bytes < 3 * kTensorBytes;) {
      if (!stream->Read(&request)) return grpc::Status(grpc::StatusCode::INTERNAL, "cut short");
      bytes += static_cast<int64_t>(request.data().size());
    }
    stream->Write(Header({1, 1, 8192, 64}));
    for (int64_t at = 0; at < first_brings_; at += kPieceBytes) {
      stream->Write(Data(v1::TENSOR_NAME_O, static_cast<uint64_t>(at), kPieceBytes));
    }
    return grpc::Status::OK;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool gone_ = false;
  std::atomic<int64_t> first_brings_{kTensorBytes};
  std::atomic<int64_t> second_took_{0};
  Second second_;
  FakeServer server_;
};

CallOptions ChunkedWithin(std::chrono::seconds timeout) {
  CallOptions options = Chunked();
  options.timeout = timeout;
  return options;
}

TEST(ChunkedStreams, AStreamThatNeverJoinsDoesNotFailTheCall) {
  for (const auto code :
       {grpc::StatusCode::NOT_FOUND, grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::CANCELLED}) {
    TwoStreams server;
    server.SetSecond([code](grpc::ServerContext*, FakeServer::ChunkedStream*) {
      return grpc::Status(code, "another server");
    });
    const auto client = Connect(server.address(), 2);
    const CallOutcome outcome =
        Wait(*client, RandomCall(kShape, 1), ChunkedWithin(std::chrono::seconds(20)));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.ToString();
    EXPECT_EQ(outcome.attempts, 1);
    EXPECT_EQ(outcome.result.o.bytes, kTensorBytes);
  }
}

// The server had let it join and assigned it a part of the answer, of which nothing arrived.
TEST(ChunkedStreams, AMissingPartOfTheAnswerHasTheLostStreamsStatus) {
  const std::pair<grpc::StatusCode, Code> cases[] = {
      {grpc::StatusCode::DEADLINE_EXCEEDED, Code::kDeadlineExceeded},
      {grpc::StatusCode::CANCELLED, Code::kUnavailable},  // not by the client
      {grpc::StatusCode::UNAVAILABLE, Code::kUnavailable},
      {grpc::StatusCode::NOT_FOUND, Code::kInternal},  // refused: it was assigned nothing
      {grpc::StatusCode::UNIMPLEMENTED, Code::kInternal}};
  for (const auto& [code, expected] : cases) {
    TwoStreams server;
    server.SetFirstBrings(kTensorBytes / 2);
    server.SetSecond([code = code](grpc::ServerContext*, FakeServer::ChunkedStream*) {
      return grpc::Status(code, "gone");
    });
    const auto client = Connect(server.address(), 2, /*attempts=*/1);
    const CallOutcome outcome =
        Wait(*client, RandomCall(kShape, 1), ChunkedWithin(std::chrono::seconds(20)));
    EXPECT_EQ(outcome.status.code(), expected) << outcome.status.ToString();
  }
}

TEST(ChunkedStreams, AStreamThatNeverJoinsIsNotAwaited) {
  TwoStreams server;
  server.SetSecond([&](grpc::ServerContext* context, FakeServer::ChunkedStream*) {
    server.Gone();
    return server.server().UntilCancelled(context);
  });
  const auto client = Connect(server.address(), 2);
  const CallOutcome outcome =
      Wait(*client, RandomCall(kShape, 1), ChunkedWithin(std::chrono::seconds(20)));
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.ToString();
}

TEST(ChunkedStreams, AnAttemptCancelledByTheServerIsRetried) {
  TwoStreams server;
  std::atomic<int> seconds{0};
  server.SetSecond([&](grpc::ServerContext*, FakeServer::ChunkedStream* stream) {
    if (seconds++ > 0) return grpc::Status(grpc::StatusCode::NOT_FOUND, "");
    v1::AttendChunkedResponse granted;
    granted.mutable_grant()->set_chunk_bytes_max(kPieceBytes);
    stream->Write(granted);
    v1::AttendChunkedRequest piece;  // which is lost with it
    EXPECT_TRUE(stream->Read(&piece));
    return grpc::Status(grpc::StatusCode::CANCELLED, "another stream was lost");
  });
  const auto client = Connect(server.address(), 2);
  const CallOutcome outcome = Wait(*client, RandomCall(kShape, 1), Chunked());
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.ToString();
  EXPECT_EQ(outcome.attempts, 2);
}

TEST(ChunkedStreams, ALostJoinedStreamEndsTheAttempt) {
  TwoStreams server;
  server.SetSecond([](grpc::ServerContext*, FakeServer::ChunkedStream* stream) {
    stream->Write(Grant(2, kPieceBytes));
    v1::AttendChunkedRequest piece;  // which is lost with it
    EXPECT_TRUE(stream->Read(&piece));
    return grpc::Status(grpc::StatusCode::NOT_FOUND, "lost");
  });
  const auto client = Connect(server.address(), 2);
  const CallOutcome outcome = Wait(*client, RandomCall(kShape, 1), Chunked());
  EXPECT_EQ(outcome.status.code(), Code::kNotFound) << outcome.status.ToString();
  EXPECT_THAT(outcome.status.message(), HasSubstr("lost"));
}

TEST(ChunkedStreams, TensorsAreSentOneAfterAnother) {
  FakeServer server;
  const AttentionCall call = RandomCall("B1,H2,L8192,D64", 1);  // 4 MiB per tensor
  constexpr uint64_t kSent = ChunkedCall::kPieceBytes;
  std::vector<std::pair<v1::TensorName, uint64_t>> came;
  server.SetChunked([&](grpc::ServerContext*, FakeServer::ChunkedStream* stream) {
    v1::AttendChunkedRequest piece;
    stream->Read(&piece);
    stream->Write(Grant(1, int64_t{4} << 20));
    for (int i = 0; i < 6 && stream->Read(&piece); ++i) {
      came.emplace_back(piece.tensor(), piece.offset());
      const TensorRef* const tensors[] = {&call.q, &call.k, &call.v};
      const TensorRef& from = *tensors[(piece.tensor() - v1::TENSOR_NAME_Q) % 3];
      const std::string_view all(static_cast<const char*>(from.data), 2 * kSent);
      EXPECT_TRUE(piece.data() == all.substr(piece.offset(), kSent));
    }
    return grpc::Status(grpc::StatusCode::DATA_LOSS, "seen enough");
  });
  const auto client = Connect(server.address(), 1, /*attempts=*/1);
  Wait(*client, call, ChunkedWithin(std::chrono::seconds(60)));
  using ::testing::ElementsAre;
  using ::testing::Pair;
  EXPECT_THAT(came, ElementsAre(Pair(v1::TENSOR_NAME_Q, 0), Pair(v1::TENSOR_NAME_Q, kSent),
                                Pair(v1::TENSOR_NAME_K, 0), Pair(v1::TENSOR_NAME_K, kSent),
                                Pair(v1::TENSOR_NAME_V, 0), Pair(v1::TENSOR_NAME_V, kSent)));
}

// Chunks of the second stream may overtake the header, which the first stream sends only after the
// second one has ended.
TEST(ChunkedStreams, ChunksBeforeTheHeaderArePlaced) {
  for (const Payload payload : {Payload::kCopy, Payload::kDiscard}) {
    TwoStreams server;
    server.SetFirstBrings(kTensorBytes / 2);
    server.SetSecond([&](grpc::ServerContext*, FakeServer::ChunkedStream* stream) {
      stream->Write(Grant(2, kPieceBytes));
      stream->Write(Data(v1::TENSOR_NAME_O, kTensorBytes / 2, kTensorBytes / 2, '\2'));
      v1::AttendChunkedRequest piece;
      while (stream->Read(&piece)) server.SecondTook(piece.data().size());
      return grpc::Status::OK;
    });
    const auto client = Connect(server.address(), 2, /*attempts=*/1);
    CallOptions options = ChunkedWithin(std::chrono::seconds(60));
    options.payload = payload;
    const CallOutcome outcome = Wait(*client, RandomCall(kShape, 1), options);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.ToString();
    EXPECT_EQ(outcome.payload_bytes, kTensorBytes);
    const HostTensor& o = outcome.result.o;
    EXPECT_EQ(o.shape, (std::vector<int64_t>{1, 1, 8192, 64}));
    ASSERT_EQ(o.data != nullptr, payload == Payload::kCopy);
    if (payload == Payload::kDiscard) continue;
    EXPECT_EQ(std::count(&o.data[0], &o.data[kTensorBytes / 2], std::byte{1}), kTensorBytes / 2);
    EXPECT_EQ(std::count(&o.data[kTensorBytes / 2], &o.data[0] + kTensorBytes, std::byte{2}),
              kTensorBytes / 2);
  }
}

TEST(ChunkedStreams, BadChunksBeforeTheHeaderAreRefusedAtOnce) {
  TwoStreams server;
  server.SetSecond([&](grpc::ServerContext* context, FakeServer::ChunkedStream* stream) {
    stream->Write(Grant(2, kPieceBytes));
    stream->Write(Data(v1::TENSOR_NAME_O, kTensorBytes - 1, 2));
    return server.server().UntilCancelled(context);
  });
  const auto client = Connect(server.address(), 2, /*attempts=*/1);
  const CallOutcome outcome =
      Wait(*client, RandomCall(kShape, 1), ChunkedWithin(std::chrono::seconds(60)));
  EXPECT_EQ(outcome.status.code(), Code::kInternal) << outcome.status.ToString();
  EXPECT_THAT(outcome.status.message(), HasSubstr("not within the tensor's 2097152"));
}

// All its calls are large enough for chunks.
std::unique_ptr<Client> ConnectForChunks(const std::string& address) {
  return Connect(address, /*connections=*/2, /*attempts=*/5, /*chunked_bytes_min=*/1);
}

AttentionCall Large() { return RandomCall("B1,H2,L100,D64", 1); }

TEST(ChunkedStreams, AServerWithoutChunksGetsOneMessage) {
  FakeServer server;  // answers UNIMPLEMENTED
  std::atomic<int> messages{0};
  server.SetBefore([&](int64_t, grpc::ServerContext*) {
    ++messages;
    return grpc::Status::OK;
  });
  const auto client = ConnectForChunks(server.address());
  for (int i = 1; i <= 2; ++i) {
    const CallOutcome outcome = Wait(*client, Large(), {});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.ToString();
    EXPECT_EQ(outcome.attempts, i == 1 ? 2 : 1) << "it is asked once";
    EXPECT_EQ(messages, i);
    EXPECT_EQ(server.calls(), i + 1);
  }
  EXPECT_EQ(Wait(*client, Large(), Chunked()).status.code(), Code::kUnimplemented);
  EXPECT_EQ(messages, 2) << "chunks were asked for";
}

TEST(ChunkedStreams, BorrowedMemoryIsHeldUntilTheMessageIsSent) {
  FakeServer server;
  const auto client = ConnectForChunks(server.address());
  AttentionCall call = Large();
  const AttentionCall owned = call;
  for (TensorRef* tensor : {&call.q, &call.k, &call.v}) tensor->owner = nullptr;
  EXPECT_TRUE(client->Call(call).ok());
}

TEST(ChunkedStreams, UnimplementedForLackOfAKernelDoesNotDisableChunks) {
  FakeServer server;
  server.SetBefore([&](int64_t, grpc::ServerContext*) {
    return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no kernel");
  });
  const auto client = ConnectForChunks(server.address());
  for (int i = 1; i <= 2; ++i) {
    EXPECT_THAT(Wait(*client, Large(), {}).status.message(), HasSubstr("no kernel"));
    EXPECT_EQ(server.calls(), 2 * i) << "chunks are tried first, each time";
  }
}

TEST(ChunkedStreams, ACancellationReachesTheFallbackMessage) {
  FakeServer server;
  std::promise<void> there;
  server.SetBefore([&](int64_t, grpc::ServerContext* context) {
    there.set_value();
    return server.UntilCancelled(context);
  });
  const auto client = ConnectForChunks(server.address());
  std::promise<CallOutcome> promise;
  CallHandle handle = client->CallAsync(
      Large(), {}, [&](CallOutcome outcome) { promise.set_value(std::move(outcome)); });
  there.get_future().wait();
  handle.Cancel();
  EXPECT_EQ(promise.get_future().get().status.code(), Code::kCancelled);
}

TEST(ChunkedStreams, CallsWithLongHeadersAreSentInOneMessage) {
  FakeServer server;
  const auto client = ConnectForChunks(server.address());
  AttentionCall call = Large();
  call.alibi_slopes.resize(1 << 20);  // refused there, but not for its length
  const CallOutcome outcome = Wait(*client, call, {});
  EXPECT_EQ(outcome.status.code(), Code::kInvalidArgument) << outcome.status.ToString();
  EXPECT_EQ(server.calls(), 1);
}

}  // namespace
}  // namespace attend::client
