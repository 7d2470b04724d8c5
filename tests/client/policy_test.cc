// SPDX-License-Identifier: Apache-2.0
//
// The pure deciders: retries, arrival schedules, the search for a rate, what a load draws.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "client/load_search.h"
#include "client/retry_policy.h"
#include "client/schedule.h"
#include "client/workload.h"
#include "tests/client/test_seed.h"

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

TEST(Retry, OnlyRefusalsAreTriedAgain) {
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

TEST(Retry, BackoffGrowsToItsBoundWithinTheJitter) {
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

TEST(Retry, JitterDependsOnTheSeedAlone) {
  RetryState a(Policy(), 7), b(Policy(), 7), c(Policy(), 8);
  const auto wait = a.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  EXPECT_EQ(wait, b.AfterFailure(Code::kUnavailable, {}, std::nullopt));
  EXPECT_NE(wait, c.AfterFailure(Code::kUnavailable, {}, std::nullopt));
}

TEST(Retry, OneAttemptMeansNone) {
  RetryPolicy policy = Policy();
  policy.attempts_max = 1;
  RetryState state(policy, 1);
  EXPECT_FALSE(state.AfterFailure(Code::kUnavailable, {}, std::nullopt));
}

TEST(Retry, StopsWhereTheDeadlineWouldCutTheWait) {
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

TEST(Retry, PushbackIsNeverShortenedAndStartsTheBackoffAnew) {
  ATTEND_FRESH_SEED(seed);
  RetryState state(Policy(), seed);
  (void)state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  (void)state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  const auto asked = state.AfterFailure(Code::kResourceExhausted,
                                        {Pushback::Kind::kWait, milliseconds(700)}, std::nullopt);
  ASSERT_TRUE(asked);
  EXPECT_GE(*asked, milliseconds(700));
  EXPECT_LE(*asked, milliseconds(875));
  const auto anew = state.AfterFailure(Code::kUnavailable, {}, std::nullopt);
  ASSERT_TRUE(anew);
  EXPECT_LE(*anew, nanoseconds(milliseconds(13)));
  EXPECT_FALSE(state.AfterFailure(Code::kResourceExhausted, {Pushback::Kind::kWait, seconds(2)},
                                  seconds(1)));
}

TEST(Retry, NeverMeansNever) {
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
  EXPECT_LE(ParsePushback("9223372036854775807").wait, std::chrono::hours(24)) << "no overflow";
}

TEST(Schedule, ConstantIsEven) {
  Schedule schedule(Arrivals::kConstant, 300, 1);
  for (int i = 1; i <= 3000; ++i) {
    EXPECT_NEAR(static_cast<double>(schedule.NextNs()), i * (1e9 / 300), 2);
  }
}

TEST(Schedule, PoissonHasItsMeanItsSpreadAndItsMemorylessness) {
  ATTEND_FRESH_SEED(seed);
  constexpr double kRate = 5000;
  constexpr int kCount = 200000;
  Schedule schedule(Arrivals::kPoisson, kRate, seed);
  double sum = 0, squares = 0;
  int above_mean = 0;
  int64_t before = 0;
  for (int i = 0; i < kCount; ++i) {
    const int64_t at = schedule.NextNs();
    ASSERT_GE(at, before);
    const double gap = static_cast<double>(at - before) * 1e-9 * kRate;  // mean 1
    before = at;
    sum += gap;
    squares += gap * gap;
    above_mean += gap > 1;
  }
  // Standard errors: mean 1/sqrt(n); second moment sqrt(20/n); share sqrt(p(1-p)/n). Six of each.
  const double n = kCount;
  EXPECT_NEAR(sum / n, 1.0, 6 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 2.0, 6 * std::sqrt(20 / n));
  EXPECT_NEAR(above_mean / n, std::exp(-1.0), 6 * std::sqrt(0.2326 / n));
}

TEST(Schedule, SeedsRepeatAndDiffer) {
  Schedule a(Arrivals::kPoisson, 100, 42), b(Arrivals::kPoisson, 100, 42),
      c(Arrivals::kPoisson, 100, 43);
  bool differs = false;
  for (int i = 0; i < 1000; ++i) {
    const int64_t at = a.NextNs();
    EXPECT_EQ(at, b.NextNs());
    differs = differs || at != c.NextNs();
  }
  EXPECT_TRUE(differs);
}

TEST(Random, UniformAndNormalMoments) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  constexpr int kCount = 400000;
  double uniform = 0, normal = 0, normal_squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double u = random.Uniform();
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    uniform += u;
    const double x = random.AboutNormal();
    normal += x;
    normal_squares += x * x;
  }
  EXPECT_NEAR(uniform / kCount, 0.5, 6 * 0.289 / std::sqrt(kCount));
  EXPECT_NEAR(normal / kCount, 0.0, 6 / std::sqrt(kCount));
  EXPECT_NEAR(normal_squares / kCount, 1.0, 6 * 1.5 / std::sqrt(kCount));
}

TEST(RateSearch, FindsTheLimitFromBelowAndFromAbove) {
  for (const double start : {1.0, 100.0, 50000.0}) {
    const double limit = 1234;
    RateSearch search(start, 0.02, 0.01);
    int steps = 0;
    for (; !search.done() && steps < 100; ++steps) search.Add(search.rate() <= limit);
    EXPECT_LE(search.best(), limit);
    EXPECT_GE(search.best(), limit / 1.02);
    EXPECT_LT(steps, 40);
    EXPECT_THAT(DescribeFound(search.Found(5)), ::testing::HasSubstr("highest rate"));
  }
}

TEST(RateSearch, EndsWhenNothingMeetsTheBound) {
  RateSearch search(100, 0.05, 1);
  int steps = 0;
  for (; !search.done() && steps < 100; ++steps) search.Add(false);
  EXPECT_EQ(steps, 7) << "100, 50, ... 1.5625, and none below 1";
  EXPECT_EQ(search.best(), 0);
  EXPECT_THAT(DescribeFound(search.Found(5)),
              ::testing::HasSubstr("no rate measured has p99 <= 5 ms; the lowest, 1.562/s"));
}

TEST(RateSearch, RatesAreWrittenWithoutExponents) {
  EXPECT_EQ(RateText(20000), "20000");
  EXPECT_EQ(RateText(1e7), "10000000");
  EXPECT_EQ(RateText(70.710678), "70.71");
  EXPECT_EQ(RateText(0.001), "0.001");
}

TEST(Schedule, CountsWhatIsStillToCome) {
  Schedule counted(Arrivals::kPoisson, 1000, 3), drawn(Arrivals::kPoisson, 1000, 3);
  int64_t expected = 0;
  for (int64_t at = drawn.NextNs(); at < 2'000'000'000; at = drawn.NextNs()) {
    expected += at >= 500'000'000;
  }
  EXPECT_EQ(counted.CountWithin(500'000'000, 2'000'000'000), expected);
  Schedule many(Arrivals::kConstant, 1e7, 1);
  const double an_hour = 3600e9;
  EXPECT_NEAR(static_cast<double>(many.CountWithin(0, static_cast<int64_t>(an_hour))), 3.6e10, 1e3);
}

TEST(Workload, DrawsRepeatAndFollowWeightsAndShares) {
  ATTEND_FRESH_SEED(seed);
  LoadOptions options;
  options.seed = seed;
  options.mix = {*ParseCallSpec("B1,H1,L4,D8,weight=3"), *ParseCallSpec("B1,H1,L8,D8")};
  options.pool = 3;
  options.verify_share = 0.25;
  options.cancel_share = 0.1;
  options.cancel_after_ms = 4;
  const Result<Workload> workload = Workload::Make(options);
  ASSERT_TRUE(workload.ok()) << workload.status().ToString();
  constexpr int kCount = 40000;
  int first = 0, verified = 0, cancelled = 0;
  for (uint64_t n = 0; n < kCount; ++n) {
    const Workload::Draw draw = workload->DrawRequest(n);
    const Workload::Draw again = workload->DrawRequest(n);
    EXPECT_EQ(draw.item, again.item);
    EXPECT_EQ(draw.seed, again.seed);
    first += draw.item->call.q.shape[2] == 4;
    verified += draw.verify;
    EXPECT_FALSE(draw.check);
    EXPECT_FALSE(draw.deadline);
    if (draw.cancel_after_ms >= 0) {
      ++cancelled;
      EXPECT_LT(draw.cancel_after_ms, 4);
    }
  }
  const auto within = [](int count, double share) {
    return std::abs(count / double{kCount} - share) < 6 * std::sqrt(share * (1 - share) / kCount);
  };
  EXPECT_TRUE(within(first, 0.75)) << first;
  EXPECT_TRUE(within(verified, 0.25)) << verified;
  EXPECT_TRUE(within(cancelled, 0.1)) << cancelled;
}

}  // namespace
}  // namespace attend::client
