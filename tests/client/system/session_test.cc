// SPDX-License-Identifier: Apache-2.0
//
// The library's sessions against a whole server: bits, lengths, retries, forks, lengths that
// differ.

#include "client/session.h"

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
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHeads = 4, kHeadsKv = 2, kDim = 16, kDimV = 8;

void WithSessions(Config& config) { config.session_memory_bytes = int64_t{64} << 20; }

SessionOptions Shape(int32_t layers = 1) {
  SessionOptions options;
  options.shapes = {{DType::kFloat32, kHeadsKv, kDim, kDimV}};
  options.layers = layers;
  return options;
}

// The expected contents of sequences, token by token: [Hkv, D] and [Hkv, Dv] of each.
class Sequences {
 public:
  Sequences(int64_t batch, uint64_t seed) : random_(seed), k_(batch), v_(batch) {}

  // A call that appends `rows` to each sequence and asks for `len_q` rows.
  AttentionCall Step(int64_t rows, int64_t len_q) {
    AttentionCall call;
    call.mask.kind = v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
    call.return_lse = true;
    call.q = Random4({std::ssize(k_), kHeads, len_q, kDim});
    if (rows == 0) return call;
    call.k = Random4({std::ssize(k_), kHeadsKv, rows, kDim});
    call.v = Random4({std::ssize(v_), kHeadsKv, rows, kDimV});
    Grow(call.k, kDim, &k_);
    Grow(call.v, kDimV, &v_);
    return call;
  }
  // The same call with all of K and V; the sequences are equally long.
  AttentionCall Whole(const AttentionCall& step) const {
    AttentionCall call = step;
    call.k = Joined(k_, kDim);
    call.v = Joined(v_, kDimV);
    return call;
  }
  void Truncate(int64_t length) {
    for (auto* tokens : {&k_, &v_}) {
      for (auto& sequence : *tokens) sequence.resize(static_cast<size_t>(length));
    }
  }

 private:
  using Tokens = std::vector<std::vector<std::vector<float>>>;  // by sequence and token

  HostTensor Random4(std::vector<int64_t> shape) {
    HostTensor tensor = *HostTensor::Make("t", DType::kFloat32, std::move(shape));
    auto* const values = reinterpret_cast<float*>(tensor.data.get());
    for (int64_t i = 0; i < tensor.bytes / 4; ++i) values[i] = random_.AboutNormal();
    return tensor;
  }
  static void Grow(const TensorRef& rows, int64_t dim, Tokens* to) {
    const auto* const values = static_cast<const float*>(rows.data);
    const int64_t n = rows.shape[2];
    for (int64_t b = 0; b < std::ssize(*to); ++b) {
      for (int64_t row = 0; row < n; ++row) {
        std::vector<float>& token = (*to)[b].emplace_back();
        for (int64_t h = 0; h < kHeadsKv; ++h) {
          const float* const at = values + ((b * kHeadsKv + h) * n + row) * dim;
          token.insert(token.end(), at, at + dim);
        }
      }
    }
  }
  static HostTensor Joined(const Tokens& tokens, int64_t dim) {
    const int64_t length = std::ssize(tokens[0]);
    HostTensor all =
        *HostTensor::Make("t", DType::kFloat32, {std::ssize(tokens), kHeadsKv, length, dim});
    auto* to = reinterpret_cast<float*>(all.data.get());
    for (const auto& sequence : tokens) {
      for (int64_t h = 0; h < kHeadsKv; ++h) {
        for (const auto& token : sequence) {
          to = std::copy_n(token.data() + h * dim, dim, to);
        }
      }
    }
    return all;
  }

  Random random_;
  Tokens k_, v_;
};

void ExpectSame(const AttentionResult& a, const AttentionResult& b) {
  ASSERT_EQ(a.o.shape, b.o.shape);
  EXPECT_EQ(std::memcmp(a.o.data.get(), b.o.data.get(), static_cast<size_t>(a.o.bytes)), 0);
  ASSERT_TRUE(a.lse && b.lse);
  EXPECT_EQ(std::memcmp(a.lse->data.get(), b.lse->data.get(), static_cast<size_t>(a.lse->bytes)),
            0);
}

Session Create(Client& client, const SessionOptions& options = Shape()) {
  Result<Session> session = Session::Create(client, options);
  EXPECT_TRUE(session.ok()) << session.status().ToString();
  return std::move(*session);
}

int64_t Sessions(Client& client) { return Session::List(client)->sessions_size(); }

// A server with one session of one client, and the session's expected contents.
class ClientSessionTest : public ::testing::Test {
 protected:
  // Appends, asks, and expects the bits of the same call with all of K and V.
  void ExpectBitsOfTheWhole(Session& session, Sequences& sequence, int64_t rows, int64_t len_q) {
    const AttentionCall call = sequence.Step(rows, len_q);
    const Result<AttentionResult> result = session.Attend(0, call);
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    ExpectSame(*result, *client_->Call(sequence.Whole(call)));
  }

  const uint64_t seed_ = FreshSeed();
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  TestServer server_{WithSessions};
  const std::unique_ptr<Client> client_ = Connect(server_.address(), 1);
  Session session_ = Create(*client_);
  Sequences sequence_{1, seed_};
};

// With rows to append, with zero rows, and without k and v.
TEST(ClientSession, TheMessageContainsTheSessions) {
  for (const char* text : {"B2,H4,Hkv2,Lq3,Lk5,D64", "B2,H4,Hkv2,Lq3,Lk0,D64", ""}) {
    AttentionCall call = RandomCall(text[0] == 0 ? "B2,H4,Hkv2,Lq3,Lk5,D64" : text, 1);
    if (text[0] == 0) call.k = call.v = TensorRef();
    call.sessions = {{"0123456789abcdef", 2, 70, "append"}, {"fedcba9876543210", 3, 1, ""}};
    v1::AttendRequest expected = RequestHeader(call);
    EXPECT_EQ(expected.has_k(), text[0] != 0);
    ASSERT_EQ(expected.sessions_size(), 2);
    EXPECT_EQ(expected.sessions(0).session(), "0123456789abcdef");
    EXPECT_EQ(expected.sessions(0).layer(), 2);
    EXPECT_EQ(expected.sessions(0).length(), 70);
    EXPECT_EQ(expected.sessions(0).append_id(), "append");
    for (const TensorRef* tensor : {&call.q, &call.k, &call.v}) {
      if (tensor->shape.empty()) continue;
      expected.add_raw(tensor->data, static_cast<size_t>(tensor->bytes));
    }
    const Result<EncodedCall> encoded = EncodedCall::Make(call);
    ASSERT_TRUE(encoded.ok());
    grpc::Slice bytes;
    ASSERT_TRUE(encoded->ToByteBuffer("").DumpToSingleSlice(&bytes).ok());
    EXPECT_EQ(std::string(bytes.begin(), bytes.end()), expected.SerializeAsString());
    EXPECT_EQ(EncodedCall::MakeChunked(call).ok(), text[0] != 0);
  }
}

TEST(ClientSession, StepsHaveTheBitsOfWholeCallsByEveryTransport) {
  ATTEND_FRESH_SEED(seed);
  TestServer server(WithSessions);
  const auto client = Connect(server.address(), 2);
  Session session = Create(*client, Shape(2));
  Sequences sequence(1, seed);
  const auto stream = client->OpenStream();
  int64_t length = 0;
  const std::vector<Session*> sessions = {&session};
  for (const auto& [rows, len_q] : std::vector<std::pair<int64_t, int64_t>>{
           {70, 70}, {1, 1}, {5, 2}, {0, 3}, {64, 0}, {1, 1}}) {
    for (const int way : {0, 1, 2, 3}) {
      const AttentionCall call = sequence.Step(rows, len_q);
      length += rows;
      Result<AttentionResult> result = Internal("none came");
      std::promise<void> done;
      if (way == 0) {
        result = session.Attend(1, call);
      } else if (way == 1) {
        result = session.Attend(1, call, Chunked());
      } else if (way == 2) {
        Session::AttendAsync(sessions, 1, call, {}, [&](CallOutcome outcome) {
          if (outcome.status.ok()) result = std::move(outcome.result);
          done.set_value();
        });
        done.get_future().wait();
      } else {
        Session::Send(*stream, sessions, 1, call, [&](StreamAnswer answer) {
          if (answer.status.ok()) result = std::move(answer.result);
          done.set_value();
        });
        done.get_future().wait();
      }
      ASSERT_TRUE(result.ok()) << way << ": " << result.status().ToString();
      EXPECT_EQ(session.length(1), length);
      EXPECT_THAT(result->session_lengths, ElementsAre(length));
      ExpectSame(*result, *client->Call(sequence.Whole(call)));
    }
  }
  EXPECT_EQ(session.length(0), 0);
  EXPECT_THAT(session.Get()->layer_lengths(), ElementsAre(0, length));
}

TEST(ClientSession, EverySequenceOfACallHasItsSession) {
  ATTEND_FRESH_SEED(seed);
  TestServer server(WithSessions);
  const auto client = Connect(server.address(), 1);
  Session a = Create(*client), b = Create(*client);
  Sequences sequences(2, seed);
  for (int step = 0; step < 3; ++step) {
    const AttentionCall call = sequences.Step(40, 1);
    const Result<AttentionResult> result = Session::Attend({&a, &b}, 0, call);
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    const Result<RowsReport> report = VerifyAnswer(sequences.Whole(call), *result, seed);
    EXPECT_TRUE(report.ok() && report->ok);
  }
  EXPECT_EQ(a.length(), 120);
  EXPECT_EQ(b.length(), 120);
}

TEST_F(ClientSessionTest, ForksAndTruncationsMatchTheServers) {
  ASSERT_TRUE(session_.Attend(0, sequence_.Step(200, 0)).ok());
  Result<Session> fork = session_.Fork(150);
  ASSERT_TRUE(fork.ok()) << fork.status().ToString();
  EXPECT_EQ(fork->length(), 150);
  EXPECT_NE(fork->id(), session_.id());
  EXPECT_EQ(session_.Fork(201).status().code(), Code::kOutOfRange);
  Sequences forked = sequence_;
  forked.Truncate(150);
  ASSERT_TRUE(session_.Truncate(90).ok());
  sequence_.Truncate(90);
  EXPECT_EQ(session_.length(), 90);
  for (auto& [each, held] : {std::pair{&session_, &sequence_}, std::pair{&*fork, &forked}}) {
    ExpectBitsOfTheWhole(*each, *held, 3, 3);
  }
}

TEST(ClientSession, ASessionEndsWithItsObject) {
  TestServer server(WithSessions);
  const auto client = Connect(server.address(), 1);
  std::string left;
  {
    Session first = Create(*client);
    Session second = std::move(first);
    EXPECT_EQ(Sessions(*client), 1);
    second = Create(*client);  // frees the previous one
    EXPECT_EQ(Sessions(*client), 1);
    EXPECT_TRUE(second.KeepAlive().ok());
    EXPECT_TRUE(second.Free().ok());
    EXPECT_EQ(Sessions(*client), 0);
    left = Create(*client).Release();
    const Result<Session> opened = Session::Open(*client, left);
    EXPECT_TRUE(opened.ok());
  }
  EXPECT_EQ(Sessions(*client), 1);
  EXPECT_TRUE(Session::Open(*client, left)->Free().ok());
  EXPECT_EQ(Session::Open(*client, left).status().code(), Code::kNotFound);
}

TEST_F(ClientSessionTest, AnOpenedSessionNeedsNoShape) {
  ASSERT_TRUE(session_.Attend(0, sequence_.Step(9, 0)).ok());
  Result<Session> opened = Session::Open(*client_, session_.id());
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->length(), 9);
  ExpectBitsOfTheWhole(*opened, sequence_, 0, 2);
  const Result<AttentionResult> chunked = opened->Attend(0, sequence_.Step(0, 2), Chunked());
  EXPECT_THAT(chunked.status().message(), HasSubstr("v has no shape"));
}

// Two clients of one session: the second one's length is wrong, is reported, and is right
// afterwards.
TEST_F(ClientSessionTest, AWrongLengthIsCorrected) {
  Result<Session> other = Session::Open(*client_, session_.id(), Shape());
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE(session_.Attend(0, sequence_.Step(7, 0)).ok());
  EXPECT_EQ(other->length(), 0);
  Sequences unused(1, seed_);
  const Result<AttentionResult> refused = other->Attend(0, unused.Step(1, 1));
  EXPECT_EQ(refused.status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(other->length(), 7);
  // The error has it in every transport: no further call is made.
  Result<Session> third = Session::Open(*client_, session_.id(), Shape());
  ASSERT_TRUE(session_.Attend(0, sequence_.Step(2, 0)).ok());
  EXPECT_EQ(other->Attend(0, unused.Step(1, 1), Chunked()).status().code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(other->length(), 9);
  const auto stream = client_->OpenStream();
  std::promise<Code> answered;
  Session::Send(*stream, {&*third}, 0, unused.Step(1, 1),
                [&](StreamAnswer answer) { answered.set_value(answer.status.code()); });
  EXPECT_EQ(answered.get_future().get(), Code::kFailedPrecondition);
  EXPECT_EQ(third->length(), 9);
  ExpectBitsOfTheWhole(*other, sequence_, 1, 1);
}

TEST(ClientSession, EvictedTokensHaveTheirOwnCode) {
  ATTEND_FRESH_SEED(seed);
  TestServer server([](Config& config) { config.session_memory_bytes = 16 << 20; });
  const auto client = Connect(server.address(), 1);
  Session idle = Create(*client), busy = Create(*client);
  constexpr int64_t kTokens = 70'000;
  ASSERT_TRUE(idle.Attend(0, Sequences(1, seed).Step(kTokens, 0)).ok());
  ASSERT_TRUE(busy.Attend(0, Sequences(1, seed).Step(kTokens, 0)).ok());
  EXPECT_EQ(idle.length(), kTokens);
  EXPECT_EQ(idle.Attend(0, Sequences(1, seed).Step(0, 1)).status().code(), Code::kOutOfRange);
  EXPECT_LT(idle.length(), kTokens);
  EXPECT_EQ(idle.length(), idle.Get()->length());
  EXPECT_TRUE(idle.Attend(0, Sequences(1, seed).Step(0, 1)).ok());
}

// The append takes effect, its answer is lost, and the call is retried: the rows are there once.
TEST_F(ClientSessionTest, ARetriedAppendAppendsOnce) {
  AttentionCall call = sequence_.Step(3, 2);
  call.sessions = {{session_.id(), 0, 0, "the append"}};
  const Result<AttentionResult> first = client_->Call(call);
  const Result<AttentionResult> again = client_->Call(call);
  ASSERT_TRUE(first.ok() && again.ok());
  ExpectSame(*first, *again);
  EXPECT_EQ(session_.Get()->length(), 3);
}

// A call that timed out may have appended or not: the object asks before the next one.
TEST_F(ClientSessionTest, AfterATimeoutTheLengthIsQueried) {
  server_.backend().Hold();
  CallOptions options;
  options.timeout = milliseconds(50);
  const AttentionCall lost = sequence_.Step(4, 1);
  EXPECT_EQ(session_.Attend(0, lost, options).status().code(), Code::kDeadlineExceeded);
  server_.backend().Release();
  while (server_.server().engine().inflight() > 0) std::this_thread::yield();
  Result<Session> other = Session::Open(*client_, session_.id(), Shape());
  ASSERT_TRUE(other->length() == 4 || Session::Attend({&*other}, 0, lost).ok());
  // Simply repeating the call does not append twice.
  EXPECT_EQ(session_.Attend(0, lost).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(session_.length(), 4);
  ExpectBitsOfTheWhole(session_, sequence_, 1, 1);
}

TEST(ClientSession, InvalidUsesAreRefusedByName) {
  TestServer server(WithSessions);
  const auto client = Connect(server.address(), 1);
  const auto other_client = Connect(server.address(), 1);
  Session session = Create(*client), other = Create(*other_client);
  const AttentionCall call = Sequences(1, 1).Step(1, 1);
  const auto message = [&](const std::vector<Session*>& sessions, int32_t layer) {
    return Session::Attend(sessions, layer, call).status().message();
  };
  EXPECT_THAT(message({}, 0), HasSubstr("sessions has 0 entries"));
  EXPECT_THAT(message({&session, nullptr}, 0), HasSubstr("sessions[1] is empty"));
  EXPECT_THAT(message({&session}, 1), HasSubstr("layer is 1, must be in [0, 0]"));
  EXPECT_THAT(message({&session, &other}, 0), HasSubstr("sessions[1] is of another client"));
  SessionOptions options = Shape(1000);
  EXPECT_THAT(Session::Create(*client, options).status().message(), HasSubstr("layers is 1000"));
  options = Shape();
  options.tenant = std::string(300, 'x');
  EXPECT_THAT(Session::Create(*client, options).status().message(), HasSubstr("tenant has 300"));
  AttentionCall unknown = call;
  unknown.sessions = {{}};
  EXPECT_THAT(Describe(unknown, nullptr, nullptr).status().message(),
              HasSubstr("sessions has 1 entries, must have none"));
}

TEST(ClientSession, WithoutSessionsOrAServerTheErrorNamesTheReason) {
  auto server = std::make_unique<TestServer>();
  const auto client = Connect(server->address(), 1, 2);
  EXPECT_EQ(Session::Create(*client, Shape()).status().code(), Code::kUnimplemented);
  server.reset();
  EXPECT_EQ(Session::Create(*client, Shape()).status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace attend::client
