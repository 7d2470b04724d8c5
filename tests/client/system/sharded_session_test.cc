// SPDX-License-Identifier: Apache-2.0
//
// A sequence over several servers, compared with the same attention undivided: every mask and term,
// lost servers, and calls that fail half way.

#include "client/sharded_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "client/call/key_parts.h"
#include "client/tool/verify.h"
#include "tests/client/support/chunked_calls.h"
#include "tests/client/support/test_seed.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

using test::TestServer;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Tokens = ShardedSession::Tokens;

constexpr int64_t kShardTokens = 24;

// How often gRPC polls connections that no call waits for.
[[maybe_unused]] const int kPollsOften =
    setenv("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "20", 1);

void WithSessions(Config& config) { config.session_memory_bytes = int64_t{64} << 20; }

// Servers on this host, and their clients.
class Fleet {
 public:
  explicit Fleet(int servers) {
    for (int n = 0; n < servers; ++n) {
      servers_.push_back(std::make_unique<TestServer>(WithSessions));
      addresses_ += (n == 0 ? "" : ",") + servers_.back()->address();
    }
  }
  // Once it is connected to all, so that none is left out at first.
  std::unique_ptr<Client> Connect(int attempts = 3) const {
    std::unique_ptr<Client> client = client::Connect(addresses_, 1, attempts);
    SessionOptions small;
    small.shapes = {{}};
    std::set<std::string> seen;
    while (seen.size() < servers_.size()) seen.insert(Session::Create(*client, small)->server());
    return client;
  }
  const std::string& address(int n) const { return servers_[static_cast<size_t>(n)]->address(); }
  // Ends the server of that address.
  void End(const std::string& address) {
    std::erase_if(servers_, [&](const auto& server) { return server->address() == address; });
  }

 private:
  std::vector<std::unique_ptr<TestServer>> servers_;
  std::string addresses_;
};

// A sequence of random tokens, and calls that bring them one after the other.
class Sequence {
 public:
  // `text` as CallSpec's, without lengths.
  Sequence(std::string text, int64_t tokens, uint64_t seed)
      : text_(std::move(text)), random_(seed), tokens_(Make(1, tokens, random_.Bits())) {}

  ShardedOptions Options(int32_t layers = 1) const {
    ShardedOptions options;
    options.session.shapes = {{tokens_.k.dtype,
                               tokens_.k.shape[tokens_.layout == v1::LAYOUT_BLHD ? 2 : 1],
                               tokens_.k.shape[3], tokens_.v.shape[3]}};
    options.session.layers = layers;
    options.session.timeout = std::chrono::seconds(5);
    options.shard_tokens = kShardTokens;
    return options;
  }
  TensorRef K(int64_t begin, int64_t end) const { return Rows(tokens_.k, begin, end); }
  TensorRef V(int64_t begin, int64_t end) const { return Rows(tokens_.v, begin, end); }
  v1::Layout layout() const { return tokens_.layout; }

  // The attention of `rows` random rows of q over the first `keys` tokens.
  AttentionCall Whole(int64_t rows, int64_t keys) {
    AttentionCall whole = Make(rows, keys, random_.Bits());
    whole.k = K(0, keys);
    whole.v = V(0, keys);
    return whole;
  }
  // The same, with the tokens before `begin` already there.
  AttentionCall Step(const AttentionCall& whole, int64_t begin) const {
    AttentionCall step = whole;
    const int64_t keys = whole.k.shape[RowDimension(layout())];
    step.k = begin == keys ? TensorRef() : K(begin, keys);
    step.v = begin == keys ? TensorRef() : V(begin, keys);
    return step;
  }

 private:
  AttentionCall Make(int64_t rows, int64_t keys, uint64_t seed) const {
    return RandomCall((text_ + ",Lq" + std::to_string(rows) + ",Lk" + std::to_string(keys)).c_str(),
                      seed);
  }
  TensorRef Rows(const TensorRef& tensor, int64_t begin, int64_t end) const {
    return RangeOf("rows", tensor, RowDimension(layout()), begin, end).value();
  }

  const std::string text_;
  Random random_;
  const AttentionCall tokens_;
};

void ExpectRight(const AttentionCall& whole, const Result<AttentionResult>& result) {
  ASSERT_TRUE(result.ok()) << result.status().ToString();
  EXPECT_EQ(result->o.dtype, AnswerDType(whole));
  EXPECT_EQ(result->lse.has_value(), whole.return_lse);
  const Result<RowsReport> report = VerifyAnswer(whole, *result, 1, 1e12);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_TRUE(report->ok) << report->detail;
}

// Appends tokens up to `keys`, and checks the answer to `rows` of q.
void StepTo(ShardedSession& session, Sequence& sequence, int64_t keys, int64_t rows,
            int32_t layer = 0) {
  SCOPED_TRACE(::testing::Message() << rows << " rows, to " << keys << " tokens");
  const AttentionCall whole = sequence.Whole(rows, keys);
  ExpectRight(whole, session.Attend(layer, sequence.Step(whole, session.length(layer))));
  EXPECT_EQ(session.length(layer), keys);
}

ShardedSession Create(Client& client, const ShardedOptions& options) {
  Result<ShardedSession> session = ShardedSession::Create(client, options);
  EXPECT_TRUE(session.ok()) << session.status().ToString();
  return std::move(*session);
}

TEST(ShardedSessionTest, AnswersAreThoseOfTheUndividedSequence) {
  ATTEND_FRESH_SEED(seed);
  const Fleet fleet(3);
  const auto client = fleet.Connect();
  for (const char* text :
       {"H4,Hkv2,D16,Dv8,lse", "H4,Hkv2,D16,causal,lse", "H4,D16,causal,dtype=float16",
        "H2,D16,causal,layout=blhd,lse,dtype=bfloat16", "H4,Hkv2,D16,causal,top-left,lse",
        "H4,D16,window=10:0,lse", "H4,D16,window=30:5,top-left,lse", "H4,Hkv2,D16,causal,alibi,lse",
        "H4,D16,causal,sinks,lse", "H4,D16,window=5:0,sinks,alibi,softcap=5", "H2,D16,bias,causal",
        "H2,D16,bits,lse,layout=blhd", "H4,Hkv2,D16,tree=9,causal,lse"}) {
    SCOPED_TRACE(text);
    Sequence sequence(text, 200, seed);
    ShardedSession session = Create(*client, sequence.Options());
    // A prompt over several shards, one up to a boundary, single tokens, none, and no rows of q.
    for (const auto& [keys, rows] : std::vector<std::pair<int64_t, int64_t>>{
             {61, 61}, {96, 35}, {97, 1}, {98, 2}, {98, 3}, {125, 0}, {200, 90}}) {
      StepTo(session, sequence, keys, rows);
    }
    std::set<std::string> servers;
    for (const Tokens& tokens : session.Placement()) servers.insert(tokens.server);
    EXPECT_EQ(session.Placement().back().end, 200);
    EXPECT_THAT(session.Placement(), SizeIs(9));
    EXPECT_THAT(servers, SizeIs(3));
  }
}

TEST(ShardedSessionTest, TheFirstShardsAreOnDifferentServers) {
  const Fleet fleet(3);
  const auto client = fleet.Connect();
  Sequence sequence("H2,D16,causal", 72, 1);
  for (int turn = 0; turn < 10; ++turn) {
    // Other sessions created in between must not lead two shards to one server.
    const SessionOptions other = sequence.Options().session;
    ShardedSession session = Create(*client, sequence.Options());
    ASSERT_TRUE(Session::Create(*client, other).ok() && Session::Create(*client, other).ok());
    StepTo(session, sequence, 72, 1);
    std::set<std::string> servers;
    for (const Tokens& tokens : session.Placement()) servers.insert(tokens.server);
    EXPECT_THAT(servers, SizeIs(3));
  }
}

TEST(ShardedSessionTest, OneShardHasTheBitsOfASession) {
  ATTEND_FRESH_SEED(seed);
  const Fleet fleet(1);
  const auto client = fleet.Connect();
  Sequence sequence("H4,Hkv2,D16,causal,sinks,lse,dtype=float16", kShardTokens, seed);
  ShardedSession session = Create(*client, sequence.Options());
  const AttentionCall whole = sequence.Whole(5, kShardTokens);
  const Result<AttentionResult> cut = session.Attend(0, sequence.Step(whole, 0));
  const Result<AttentionResult> uncut = client->Call(whole);
  ASSERT_TRUE(cut.ok() && uncut.ok());
  EXPECT_EQ(
      std::memcmp(cut->o.data.get(), uncut->o.data.get(), static_cast<size_t>(uncut->o.bytes)), 0);
  EXPECT_THAT(cut->session_lengths, ElementsAre(kShardTokens));
}

TEST(ShardedSessionTest, TheAnswersDetailsCombineThoseOfTheParts) {
  const Fleet fleet(2);
  const auto client = fleet.Connect();
  Sequence sequence("H4,D16,causal", 60, 1);
  ShardedSession session = Create(*client, sequence.Options());
  AttentionCall call = sequence.Whole(60, 60);
  call.check = true;
  call.request_id = "named";
  const Result<AttentionResult> answer = session.Attend(0, call);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->request_id, "named");
  ASSERT_TRUE(answer->check);
  EXPECT_TRUE(answer->check->ok && answer->timings.total_ns > 0 && !answer->kernel.empty());
  EXPECT_THAT(answer->session_lengths, ElementsAre(60));
}

TEST(ShardedSessionTest, LayersGrowIndependentlyAndAreTruncatedTogether) {
  ATTEND_FRESH_SEED(seed);
  const Fleet fleet(2);
  const auto client = fleet.Connect();
  Sequence first("H2,D16,causal", 200, seed), second("H2,D16,causal", 200, seed + 1);
  ShardedSession session = Create(*client, first.Options(2));
  EXPECT_EQ(session.layers(), 2);
  StepTo(session, first, 150, 10, 0);
  StepTo(session, second, 30, 10, 1);
  ASSERT_TRUE(session.Truncate(50).ok());
  EXPECT_EQ(session.length(0), 50);
  EXPECT_EQ(session.length(1), 30);
  EXPECT_THAT(session.Placement(0), SizeIs(3));
  StepTo(session, first, 120, 3, 0);
  StepTo(session, second, 100, 80, 1);
  EXPECT_TRUE(session.KeepAlive().ok() && session.Truncate(0).ok());
  EXPECT_THAT(session.Placement(0), IsEmpty());
}

TEST(ShardedSessionTest, ALostServersKeysAreReportedAndCanBeRestored) {
  ATTEND_FRESH_SEED(seed);
  Fleet fleet(3);
  const auto client = fleet.Connect(2);
  Sequence first("H2,Hkv1,D16,causal,lse", 130, seed), second("H2,Hkv1,D16,causal", 130, seed + 1);
  ShardedSession session = Create(*client, first.Options(2));
  StepTo(session, first, 100, 10, 0);
  StepTo(session, second, 40, 10, 1);
  const std::vector<Tokens> before = session.Placement(0);
  ASSERT_THAT(before, SizeIs(5));
  const std::vector<Tokens> there = {before[0], before[3]};
  ASSERT_EQ(before[0].server, before[3].server);
  fleet.End(before[0].server);

  const AttentionCall whole = first.Whole(2, 102);
  const Status lost = session.Attend(0, first.Step(whole, 100)).status();
  EXPECT_EQ(lost.code(), Code::kUnavailable);
  EXPECT_THAT(lost.message(), AllOf(HasSubstr("tokens ["), HasSubstr(before[0].server)));
  EXPECT_EQ(session.length(0), 100);
  const Result<std::vector<Tokens>> missing = session.Missing(0);
  EXPECT_EQ(*missing, there);
  EXPECT_THAT(*session.Missing(1), ElementsAre(Tokens{0, kShardTokens, before[0].server}));
  const Status gone = session.Attend(0, first.Step(whole, 100)).status();
  EXPECT_THAT(gone.message(), HasSubstr("tokens [0, 24) are gone"));

  for (const Tokens& tokens : *missing) {
    const int64_t middle = tokens.begin + 2;
    ASSERT_TRUE(
        session
            .Restore(0, tokens.begin, first.K(tokens.begin, middle), first.V(tokens.begin, middle))
            .ok());
    EXPECT_EQ(session
                  .Restore(0, middle + 1, first.K(middle + 1, tokens.end),
                           first.V(middle + 1, tokens.end))
                  .code(),
              Code::kFailedPrecondition);
    const Status restored =
        session.Restore(0, middle, first.K(middle, tokens.end), first.V(middle, tokens.end));
    EXPECT_TRUE(restored.ok());
  }
  EXPECT_THAT(*session.Missing(0), IsEmpty());
  ASSERT_TRUE(session.Restore(1, 0, second.K(0, 24), second.V(0, 24)).ok());
  ExpectRight(whole, session.Attend(0, first.Step(whole, 100)));
  StepTo(session, first, 130, 40, 0);
  StepTo(session, second, 130, 40, 1);
  for (const Tokens& tokens : session.Placement(0)) EXPECT_NE(tokens.server, before[0].server);
}

// Some shards have the failed call's rows, and others do not.
TEST(ShardedSessionTest, ACallThatFailedHalfWayCanBeRetried) {
  ATTEND_FRESH_SEED(seed);
  Fleet fleet(2);
  const auto client = fleet.Connect(2);
  Sequence sequence("H2,D16,causal,lse", 120, seed);
  ShardedSession session = Create(*client, sequence.Options());
  StepTo(session, sequence, 30, 10);
  const std::vector<Tokens> before = session.Placement();
  ASSERT_THAT(before, SizeIs(2));
  ASSERT_NE(before[0].server, before[1].server);
  const std::string other = before[1].server;
  fleet.End(other);

  const AttentionCall whole = sequence.Whole(70, 100);
  EXPECT_EQ(session.Attend(0, sequence.Step(whole, 30)).status().code(), Code::kUnavailable);
  EXPECT_EQ(session.length(), 30);
  // The first shard has its part of the rows; the others must be sent again.
  const Status less = session.Attend(0, sequence.Step(sequence.Whole(1, 31), 30)).status();
  EXPECT_THAT(less.message(), HasSubstr("70 rows; this call has 1"));
  ASSERT_THAT(*session.Missing(0), ElementsAre(Tokens{24, 30, other}));
  ASSERT_TRUE(session.Restore(0, 24, sequence.K(24, 30), sequence.V(24, 30)).ok());
  ExpectRight(whole, session.Attend(0, sequence.Step(whole, 30)));
  EXPECT_EQ(session.length(), 100);
}

TEST(ShardedSessionTest, TheRowsOfAFailedCallAreDropped) {
  ATTEND_FRESH_SEED(seed);
  Fleet fleet(2);
  const auto client = fleet.Connect(2);
  Sequence first("H2,D16,causal,lse", 120, seed);
  ShardedSession session = Create(*client, first.Options(2));
  StepTo(session, first, 20, 10, 0);
  StepTo(session, first, 30, 10, 1);
  ASSERT_NE(session.Placement(1)[0].server, session.Placement(1)[1].server);
  fleet.End(session.Placement(1)[1].server);
  const Sequence other("H2,D16,causal,lse", 120, seed + 1);
  AttentionCall call = first.Whole(20, 40);
  call.k = other.K(20, 40);
  call.v = other.V(20, 40);
  EXPECT_FALSE(session.Attend(0, call).ok());  // the first shard has four of its rows
  ASSERT_TRUE(session.Truncate(20).ok());
  StepTo(session, first, 40, 20, 0);
  StepTo(session, first, 40, 20, 1);
}

TEST(ShardedSessionTest, KeysThatOneShardLosesAreReportedMissing) {
  ATTEND_FRESH_SEED(seed);
  const Fleet fleet(2);
  const auto client = fleet.Connect();
  Sequence sequence("H2,D16,causal", 60, seed);
  ShardedSession session = Create(*client, sequence.Options());
  StepTo(session, sequence, 60, 10);
  // Another client truncates the first shard's session, and frees the second's.
  const auto list = [&](int n) {
    return Session::List(*client, "", {}, session.Placement()[static_cast<size_t>(n)].server);
  };
  SessionOptions at;
  at.server = session.Placement()[1].server;
  ASSERT_EQ(list(1)->sessions_size(), 1);
  ASSERT_TRUE(Session::Open(*client, list(1)->sessions(0).id(), at)->Free().ok());
  at.server = session.Placement()[0].server;
  const v1::ListSessionsResponse listed = list(0).value();
  for (const v1::Session& each : listed.sessions()) {
    Session opened = Session::Open(*client, each.id(), at).value();
    if (opened.length() <= 20) continue;
    ASSERT_TRUE(opened.Truncate(20).ok());
  }
  const AttentionCall whole = sequence.Whole(1, 60);
  EXPECT_FALSE(session.Attend(0, sequence.Step(whole, 60)).ok());
  ASSERT_THAT(*session.Missing(0), ElementsAre(Tokens{20, 24, at.server},
                                               Tokens{24, 48, session.Placement()[1].server}));
  ASSERT_TRUE(session.Restore(0, 20, sequence.K(20, 48), sequence.V(20, 48)).ok());
  ExpectRight(whole, session.Attend(0, sequence.Step(whole, 60)));
}

TEST(ShardedSessionTest, MismatchedCallsAreRefused) {
  const Fleet fleet(2);
  const auto client = fleet.Connect();
  Sequence sequence("H2,D16,causal", 60, 1);
  const auto refused = [&](const auto& change) {
    ShardedOptions options = sequence.Options();
    change(options);
    return ShardedSession::Create(*client, options).status().message();
  };
  EXPECT_THAT(refused([](auto& o) { o.shard_tokens = 12; }), HasSubstr("shard_tokens is 12"));
  EXPECT_THAT(refused([](auto& o) { o.shard_tokens = 0; }), HasSubstr("shard_tokens is 0"));
  EXPECT_THAT(refused([](auto& o) { o.session.shapes.clear(); }), HasSubstr("has 0 entries"));
  EXPECT_THAT(refused([](auto& o) { o.session.layers = 1000; }), HasSubstr("layers is 1000"));
  EXPECT_THAT(refused([&](auto& o) { o.session.server = fleet.address(0); }),
              HasSubstr("session.server is "));

  ShardedSession session = Create(*client, sequence.Options());
  StepTo(session, sequence, 30, 10);
  const auto message = [&](const auto& change) {
    AttentionCall call = sequence.Step(sequence.Whole(1, 31), 30);
    change(call);
    return session.Attend(0, call).status().message();
  };
  EXPECT_THAT(message([](auto& c) { c.layout = v1::LAYOUT_LHD; }), HasSubstr("layout is LHD"));
  EXPECT_THAT(message([](auto& c) { c.q.shape[0] = 2; }), HasSubstr("must have B = 1"));
  EXPECT_THAT(message([](auto& c) { c.v = TensorRef(); }), HasSubstr("four dimensions"));
  EXPECT_THAT(message([](auto& c) { c.q.bytes -= 4; }), HasSubstr("q has 124 bytes"));
  EXPECT_THAT(message([](auto& c) { c.v = c.q, c.v.shape[2] = 2; }), HasSubstr("as many rows"));
  EXPECT_THAT(message([](auto& c) { c.k.shape[2] = c.v.shape[2] = -3; }), HasSubstr("below 0"));
  EXPECT_THAT(message([](auto& c) { c.bias = c.q; }), HasSubstr("must have Lk = 31"));
  EXPECT_THAT(message([](auto& c) { c.mask.keys_after = 1; }), HasSubstr("keys_after 1"));
  EXPECT_THAT(session.Missing(-1).status().message(), HasSubstr("layer is -1"));
  EXPECT_THAT(session.Truncate(-1).message(), HasSubstr("length is -1"));
  EXPECT_THAT(session.Restore(0, 25, sequence.K(25, 31), sequence.V(25, 31)).message(),
              HasSubstr("tokens [25, 31)"));
  EXPECT_EQ(session.length(), 30);
  StepTo(session, sequence, 31, 1);
}

}  // namespace
}  // namespace attend::client
