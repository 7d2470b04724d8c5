// SPDX-License-Identifier: Apache-2.0
//
// The load of sessions against a whole server: counts, answers kept for verification, and verdicts.

#include "client/load/session_load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "client/session.h"
#include "tests/client/support/chunked_calls.h"
#include "tests/client/support/test_seed.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

using test::TestServer;
using ::testing::HasSubstr;

void WithSessions(Config& config) { config.session_memory_bytes = int64_t{64} << 20; }

LoadOptions Options(const TestServer& server, uint64_t seed) {
  LoadOptions options;
  options.client.server = server.address();
  options.client.connections = 2;
  options.client.retry.attempts_max = 1;
  options.mix = {*ParseCallSpec("H4,Hkv2,D16,Dv8,lse")};
  options.seed = seed;
  options.session = {.sessions = 5, .context = 70, .decode = 6, .layers = 2};
  return options;
}

SessionLoadResult RunLoad(const LoadOptions& options) {
  const std::atomic<bool> interrupted{false};
  Result<SessionLoadResult> result = RunSessionLoad(options, interrupted);
  EXPECT_TRUE(result.ok()) << result.status().ToString();
  return std::move(*result);
}

TEST(SessionLoad, CountsPromptsAndTokensAndVerifiesThem) {
  ATTEND_FRESH_SEED(seed);
  TestServer server(WithSessions);
  LoadOptions options = Options(server, seed);
  options.verify_share = 1;
  options.session.fork_share = 1;
  const SessionLoadResult result = RunLoad(options);
  EXPECT_FALSE(result.failed());
  EXPECT_EQ(result.stats.sessions, 10);
  EXPECT_EQ(result.stats.forks, 5);
  EXPECT_EQ(result.stats.prompts, 5);
  EXPECT_EQ(result.stats.tokens, 60);
  EXPECT_EQ(result.stats.prompt_ns.count(), 5);
  EXPECT_EQ(result.stats.step_ns.count(), 60);
  // Per layer: q of four heads, k and v of two.
  EXPECT_EQ(result.bytes_in_per_token(), 2 * (4 * 16 + 2 * 16 + 2 * 8) * 4);
  EXPECT_EQ(result.bytes_out_per_token(), 2 * (4 * 8 + 4) * 4);  // O and LSE
  EXPECT_GT(result.tokens_per_s(), 0);
  EXPECT_GT(result.prompts_per_s(), 0);
  // Six steps of each sequence: below the number verified at most.
  EXPECT_EQ(result.verified.passed, 5 * (1 + 2 * 6));
  EXPECT_EQ(result.verified.failed, 0);
  const auto client = Connect(server.address(), 1);
  EXPECT_EQ(Session::List(*client)->sessions_size(), 0);
  const auto file = nlohmann::json::parse(SessionLoadJson(options, {result}));
  const auto& json = file["steps"][0];
  EXPECT_EQ(json["tokens"], 60);
  EXPECT_EQ(json["step_ms"]["count"], 60);
  EXPECT_EQ(json["client_verification"]["passed"], 65);
  EXPECT_EQ(json["bytes_sent_per_token"], 896);
  EXPECT_EQ(json["bytes_received_per_token"], 288);
  EXPECT_EQ(file["method"], "Attend");
  EXPECT_EQ(json["sessions"], 5);
  const std::string table = SessionLoadTable(options, result);
  EXPECT_THAT(table, HasSubstr("5 sequences at once, prompts of 70 tokens, 6 steps, 2 layers"));
  EXPECT_THAT(table, HasSubstr("H4,Hkv2,D16,Dv8,dtype=float32"));
}

TEST(SessionLoad, StepsAreSentOverStreams) {
  ATTEND_FRESH_SEED(seed);
  TestServer server(WithSessions);
  LoadOptions options = Options(server, seed);
  options.verify_share = 1;
  options.stream = true;
  const SessionLoadResult result = RunLoad(options);
  EXPECT_FALSE(result.failed());
  EXPECT_EQ(result.stats.tokens, 30);
  EXPECT_EQ(result.bytes_out_per_token(), 288);
  EXPECT_EQ(result.verified.passed, 5 * (1 + 6));
  EXPECT_EQ(nlohmann::json::parse(SessionLoadJson(options, {result}))["method"], "AttendStream");
  EXPECT_THAT(SessionLoadTable(options, result), HasSubstr("/s over streams"));
}

// The answers after a KeepDraft are right only if the client and the server keep the same tokens.
TEST(SessionLoad, AStepWithATreeKeepsAPathOfItsDraft) {
  ATTEND_FRESH_SEED(seed);
  for (const bool stream : {false, true}) {
    TestServer server(WithSessions);
    std::atomic<int64_t> drafts = 0, others = 0;
    server.backend().Corrupt([&](const Attention& a) {
      if (a.problem.len_q != 70) ++(a.problem.len_q == 11 ? drafts : others);
    });
    LoadOptions options = Options(server, seed);
    options.mix = {*ParseCallSpec("H4,Hkv2,D16,Dv8,lse,tree=11")};
    options.verify_share = 1;
    options.session.fork_share = 1;
    options.stream = stream;
    const SessionLoadResult result = RunLoad(options);
    EXPECT_FALSE(result.failed()) << SessionLoadTable(options, result);
    EXPECT_EQ(result.stats.step_ns.count(), 60);
    EXPECT_EQ(drafts, 60 * 2);
    EXPECT_EQ(others, 0);
    // At least a token of each draft is kept, and not all of all.
    EXPECT_GE(result.stats.tokens, 60);
    EXPECT_LT(result.stats.tokens, 60 * 11);
    EXPECT_EQ(result.verified.passed, 5 * (1 + 2 * 6));
    EXPECT_EQ(result.verified.failed, 0);
    EXPECT_THAT(SessionLoadTable(options, result), HasSubstr("dtype=float32,tree=11"));
  }
}

TEST(SessionLoad, AWrongTokenOfADraftIsFound) {
  ATTEND_FRESH_SEED(seed);
  TestServer server(WithSessions);
  server.backend().Corrupt([](const Attention& a) {
    // Rows begin with tokens (BLHD) of 4 heads and 8 elements: the sixth token.
    if (a.problem.len_q == 11) static_cast<float*>(a.o.data)[5 * 4 * 8] += 1;
  });
  LoadOptions options = Options(server, seed);
  options.mix = {*ParseCallSpec("H4,Hkv2,D16,Dv8,lse,tree=11")};
  options.verify_share = 1;
  const SessionLoadResult result = RunLoad(options);
  EXPECT_EQ(result.verified.failed, 5 * 6);
  EXPECT_EQ(result.verified.passed, 5);
}

TEST(SessionLoad, ARefusalOnAStreamEndsItsSequence) {
  TestServer server(WithSessions);
  server.backend().FailItem(6, Internal("planted"));  // a step's: five prompts come first
  LoadOptions options = Options(server, 1);
  options.session.layers = 1;
  options.stream = true;
  const SessionLoadResult result = RunLoad(options);
  EXPECT_EQ(result.stats.unexpected, 1);
  EXPECT_EQ(result.stats.failures.at(Code::kInternal), 1);
}

TEST(SessionLoad, AWrongAnswerIsFound) {
  ATTEND_FRESH_SEED(seed);
  TestServer server(WithSessions);
  server.backend().Corrupt([](const Attention& a) {
    if (a.problem.len_q == 1 && a.problem.len_k == 76) static_cast<float*>(a.o.data)[3] += 1;
  });
  LoadOptions options = Options(server, seed);
  options.verify_share = 1;
  const SessionLoadResult result = RunLoad(options);
  EXPECT_TRUE(result.failed());
  EXPECT_EQ(result.verified.failed, 5);  // each sequence's last token
  EXPECT_EQ(result.verified.passed, 5 * 6);
  EXPECT_THAT(SessionLoadTable(options, result), HasSubstr("FAILED 5"));
}

TEST(SessionLoad, ARefusalEndsItsSequence) {
  TestServer server(WithSessions);
  LoadOptions options = Options(server, 1);
  options.session.layers = 1000;
  const SessionLoadResult refused = RunLoad(options);
  EXPECT_TRUE(refused.failed());
  EXPECT_EQ(refused.stats.unexpected, 5);
  EXPECT_EQ(refused.stats.failures.at(Code::kInvalidArgument), 5);
  EXPECT_EQ(refused.tokens_per_s(), 0);
  EXPECT_EQ(refused.bytes_in_per_token(), 0);
  EXPECT_EQ(refused.bytes_out_per_token(), 0);
  EXPECT_THAT(SessionLoadTable(options, refused),
              HasSubstr("sequences ended by INVALID_ARGUMENT: 5, the first: layers is 1000"));
  options.allowed = {Code::kInvalidArgument};
  EXPECT_FALSE(RunLoad(options).failed());
}

TEST(SessionLoad, AnInterruptEndsTheLoad) {
  TestServer server(WithSessions);
  LoadOptions options = Options(server, 1);
  options.session.think_ms = 1e6;
  std::atomic<bool> interrupted{false};
  std::thread later([&] {
    const auto client = Connect(server.address(), 1);
    while (Session::List(*client)->sessions_size() < 5) std::this_thread::yield();
    interrupted = true;
  });
  const Result<SessionLoadResult> result = RunSessionLoad(options, interrupted);
  later.join();
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->interrupted);
  EXPECT_FALSE(result->failed());
  EXPECT_EQ(result->stats.tokens, 0);
}

TEST(SessionLoad, SequencesThatDoNotFitAreRefusedFirst) {
  TestServer server(WithSessions);
  const std::atomic<bool> interrupted{false};
  const auto message = [&](const char* shape, int64_t bytes_max) {
    LoadOptions options = Options(server, 1);
    options.mix = {*ParseCallSpec(shape)};
    options.input_bytes_max = bytes_max;
    return RunSessionLoad(options, interrupted).status().message();
  };
  EXPECT_THAT(message("B2,H1", INT64_MAX), HasSubstr("excludes B above 1"));
  EXPECT_THAT(message("H1,bias", INT64_MAX), HasSubstr("bias"));
  EXPECT_THAT(message("H1,bits", INT64_MAX), HasSubstr("bits"));
  EXPECT_THAT(message("H1,layout=lhd", INT64_MAX), HasSubstr("layout=lhd"));
  EXPECT_THAT(message("H1", 1000), HasSubstr("see --sessions"));
  EXPECT_THAT(message("H1,tree=1024", 3 << 20), HasSubstr("see --sessions"));
}

}  // namespace
}  // namespace attend::client
