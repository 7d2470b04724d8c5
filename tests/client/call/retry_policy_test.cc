// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <chrono>

#include "client/call/retry_policy.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

RetryPolicy Policy() {
  RetryPolicy policy;
  policy.attempts_max = 10;
  policy.backoff_initial = milliseconds(10);
  policy.backoff_max = milliseconds(100);
  policy.backoff_multiplier = 2;
  policy.jitter = 0.25;
  return policy;
}

TEST(Retry, OnlyRefusalsAreRetried) {
  for (int code = 1; code <= 16; ++code) {
    RetryState state(Policy(), 1);
    const bool retried = state.AfterFailure(static_cast<Code>(code), {}, std::nullopt).has_value();
    EXPECT_EQ(retried, code == 14) << code;
    const Pushback later{Pushback::Kind::kWait, milliseconds(3)};
    EXPECT_EQ(state.AfterFailure(static_cast<Code>(code), later, std::nullopt).has_value(),
              code == 8 || code == 14)
        << code;
  }
}

TEST(Retry, BackoffGrowsToItsBoundWithJitter) {
  ATTEND_FRESH_SEED(seed);
  RetryState state(Policy(), seed);
  double expected_ms = 10;
  for (int failure = 1; failure < 10; ++failure) {
    const auto wait = state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
    ASSERT_TRUE(wait) << failure;
    const double ms = std::chrono::duration<double, std::milli>(*wait).count();
    EXPECT_GE(ms, expected_ms * 0.75 - 1e-3);
    EXPECT_LE(ms, expected_ms * 1.25 + 1e-3);
    expected_ms = std::min(100.0, expected_ms * 2);
  }
  EXPECT_FALSE(state.AfterFailure(Code::kUnavailable, {}, std::nullopt)) << "the tenth is the last";
}

TEST(Retry, JitterDependsOnlyOnTheSeed) {
  RetryState a(Policy(), 7), b(Policy(), 7), c(Policy(), 8);
  const auto wait = a.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  EXPECT_EQ(wait, b.AfterFailure(Code::kUnavailable, {}, std::nullopt));
  EXPECT_NE(wait, c.AfterFailure(Code::kUnavailable, {}, std::nullopt));
}

TEST(Retry, OneAttemptMeansNoRetry) {
  RetryPolicy policy = Policy();
  policy.attempts_max = 1;
  RetryState state(policy, 1);
  EXPECT_FALSE(state.AfterFailure(Code::kUnavailable, {}, std::nullopt));
}

TEST(Retry, StopsIfTheDeadlineWouldCutTheWait) {
  // A manual clock: the deadline is at 100 ms, and every attempt takes 5 ms.
  ATTEND_FRESH_SEED(seed);
  RetryState state(Policy(), seed);
  nanoseconds now{0};
  const nanoseconds deadline = milliseconds(100);
  int attempts = 1;
  for (;; ++attempts) {
    now += milliseconds(5);
    const auto wait = state.AfterFailure(Code::kUnavailable, {}, deadline - now);
    if (!wait) break;
    now += *wait;
    ASSERT_LT(now, deadline);
  }
  EXPECT_GE(attempts, 3);
  EXPECT_LE(attempts, 5);
}

TEST(Retry, PushbackIsNeverShortenedAndRestartsTheBackoff) {
  ATTEND_FRESH_SEED(seed);
  RetryState state(Policy(), seed);
  (void)state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  (void)state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  const auto asked = state.AfterFailure(Code::kResourceExhausted,
                                        {Pushback::Kind::kWait, milliseconds(700)}, std::nullopt);
  ASSERT_TRUE(asked);
  EXPECT_GE(*asked, milliseconds(700));
  EXPECT_LE(*asked, milliseconds(875));
  const auto restarted = state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  ASSERT_TRUE(restarted);
  EXPECT_LE(*restarted, nanoseconds(milliseconds(13)));
  EXPECT_FALSE(state.AfterFailure(Code::kResourceExhausted, {Pushback::Kind::kWait, seconds(2)},
                                  seconds(1)));
}

TEST(Retry, PushbackThatForbidsRetriesIsHonoured) {
  RetryState state(Policy(), 1);
  EXPECT_FALSE(state.AfterFailure(Code::kUnavailable, {Pushback::Kind::kNever, {}}, std::nullopt));
}

TEST(Retry, ParsesPushback) {
  EXPECT_EQ(ParsePushback(std::nullopt).kind, Pushback::Kind::kNone);
  EXPECT_EQ(ParsePushback("250").kind, Pushback::Kind::kWait);
  EXPECT_EQ(ParsePushback("250").wait, milliseconds(250));
  EXPECT_EQ(ParsePushback("0").wait, milliseconds(0));
  for (const char* never : {"-1", "", "soon", "12x", " 5", "1e3", "99999999999999999999"}) {
    EXPECT_EQ(ParsePushback(never).kind, Pushback::Kind::kNever) << never;
  }
  EXPECT_EQ(ParsePushback("60000").wait, seconds(60));
  for (const char* longer : {"60001", "86400000", "9223372036854775807"}) {
    EXPECT_EQ(ParsePushback(longer).wait, seconds(60)) << longer;
  }
}

}  // namespace
}  // namespace attend::client
