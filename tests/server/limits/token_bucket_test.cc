// SPDX-License-Identifier: Apache-2.0

#include "server/limits/token_bucket.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <random>

namespace attend {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr TimePoint kStart{hours(1)};

TEST(TokenBucket, WithoutARateEverythingIsAccepted) {
  TokenBucket bucket;
  for (int i = 0; i < 3; ++i) bucket.Charge(kMost, kStart);
  EXPECT_EQ(bucket.Wait(kStart), Duration::zero());
  EXPECT_EQ(bucket.Missing(kStart), 0);
}

TEST(TokenBucket, AllowsItsBurstThenItsRate) {
  TokenBucket bucket({1000, 500});
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(bucket.Wait(kStart), Duration::zero()) << i;
    bucket.Charge(100, kStart);
  }
  EXPECT_EQ(bucket.Missing(kStart), 500);
  EXPECT_EQ(bucket.Wait(kStart), Duration::zero());  // empty is not in debt
  bucket.Charge(100, kStart);
  EXPECT_EQ(bucket.Missing(kStart), 600);
  EXPECT_EQ(bucket.Wait(kStart), milliseconds(100));
  EXPECT_EQ(bucket.Wait(kStart + milliseconds(99)), milliseconds(1));
  EXPECT_EQ(bucket.Wait(kStart + milliseconds(100)), Duration::zero());
  // Full again, and never fuller, however long it rests.
  EXPECT_EQ(bucket.Missing(kStart + milliseconds(600)), 0);
  bucket.Charge(500, kStart + hours(1000));
  bucket.Charge(1, kStart + hours(1000));
  EXPECT_GT(bucket.Wait(kStart + hours(1000)), Duration::zero());
}

TEST(TokenBucket, AChargeAboveTheBurstIsAcceptedAndPaidOff) {
  TokenBucket bucket({1000, 10});
  bucket.Charge(60'000, kStart);
  EXPECT_EQ(bucket.Wait(kStart), seconds(60) - milliseconds(10));
  EXPECT_EQ(bucket.Missing(kStart), 60'000);
}

TEST(TokenBucket, UnusedChargesAreReturned) {
  TokenBucket bucket({1000, 1000});
  bucket.Charge(5000, kStart);
  bucket.Return(5000);
  EXPECT_EQ(bucket.Missing(kStart), 0);
  EXPECT_EQ(bucket.Wait(kStart), Duration::zero());
  // Returning to a full bucket does not make it fuller.
  bucket.Charge(1000, kStart);
  bucket.Return(1000);
  bucket.Charge(2000, kStart + seconds(10));
  EXPECT_EQ(bucket.Wait(kStart + seconds(10)), seconds(1));
}

TEST(TokenBucket, AChargeWithoutDebtStopsAtEmpty) {
  TokenBucket bucket({1000, 500});
  EXPECT_EQ(bucket.ChargeWithoutDebt(200, kStart), 0);
  EXPECT_EQ(bucket.Missing(kStart), 200);
  EXPECT_EQ(bucket.ChargeWithoutDebt(1000, kStart), 700);
  EXPECT_EQ(bucket.Missing(kStart), 500);
  EXPECT_EQ(bucket.Wait(kStart), Duration::zero());
  bucket.Charge(100, kStart);
  EXPECT_EQ(bucket.ChargeWithoutDebt(kMost, kStart), kMost) << "in debt";
  EXPECT_EQ(bucket.Wait(kStart), milliseconds(100));
  TokenBucket unbounded;
  EXPECT_EQ(unbounded.ChargeWithoutDebt(kMost, kStart), 0);
}

TEST(TokenBucket, AChargeWithoutDebtNeverMakesDebt) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int run = 0; run < 2000; ++run) {
    const auto any = [&] { return static_cast<int64_t>(random() >> (1 + random() % 63)); };
    TokenBucket bucket({1 + any() / 2, 1 + any() / 2});
    TimePoint now = kStart;
    for (int i = 0; i < 20; ++i) {
      now += nanoseconds(random() % 3'000'000'000);
      const int64_t units = any();
      const int64_t rest = bucket.ChargeWithoutDebt(units, now);
      ASSERT_GE(rest, 0);
      ASSERT_LE(rest, units);
      ASSERT_EQ(bucket.Wait(now), Duration::zero());
    }
  }
}

TEST(TokenBucket, ANewRateKeepsTheDebt) {
  TokenBucket bucket({1000, 1000});
  bucket.Charge(11'000, kStart);
  EXPECT_EQ(bucket.Wait(kStart), seconds(10));
  bucket.SetRate({10'000, 1000}, kStart);
  EXPECT_EQ(bucket.Missing(kStart), 11'000);
  EXPECT_EQ(bucket.Wait(kStart), seconds(1));
  bucket.SetRate({10'000, 1000}, kStart + seconds(1));  // the same rate: nothing changes
  EXPECT_EQ(bucket.Missing(kStart + seconds(1)), 1000);
  bucket.SetRate({}, kStart);
  EXPECT_EQ(bucket.Wait(kStart), Duration::zero());
  bucket.SetRate({1, 1}, kStart);
  EXPECT_EQ(bucket.Missing(kStart), 0);  // without a rate there was no debt
}

TEST(TokenBucket, HugeNumbersDoNotOverflow) {
  for (const int64_t rate : {int64_t{1}, int64_t{1'000'000'000}, kMost}) {
    for (const int64_t burst : {int64_t{1}, kMost}) {
      TokenBucket bucket({rate, burst});
      for (int i = 0; i < 10; ++i) {
        bucket.Charge(kMost, kStart);
        EXPECT_GE(bucket.Wait(kStart), Duration::zero());
        EXPECT_GE(bucket.Missing(kStart), 0);
      }
      bucket.Return(kMost);
      bucket.SetRate({kMost, kMost}, kStart);
      bucket.SetRate({1, 1}, kStart);
      EXPECT_GE(bucket.Wait(kStart), Duration::zero());
    }
  }
}

// In time t a bucket accepts at most burst + t * rate + one charge, whatever the load. A client
// that waits as long as it was told is accepted.
TEST(TokenBucket, HoldsItsRateUnderRandomLoad) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int run = 0; run < 50; ++run) {
    const Rate rate{pick(1, 2'000'000'000'000), pick(1, 1'000'000'000)};
    const int64_t most = pick(1, 2 * rate.per_second);
    TokenBucket bucket(rate);
    TimePoint now = kStart;
    __extension__ __int128 taken = 0;
    for (int i = 0; i < 2000; ++i) {
      if (pick(0, 3) == 0) now += nanoseconds(pick(0, 1'000'000'000));
      if (const Duration wait = bucket.Wait(now); wait > Duration::zero()) {
        if (pick(0, 1) == 0) continue;
        now += wait;
        ASSERT_EQ(bucket.Wait(now), Duration::zero());
      }
      const int64_t units = pick(0, most);
      bucket.Charge(units, now);
      taken += units;
    }
    const double t = std::chrono::duration<double>(now - kStart).count();
    const double allowed = static_cast<double>(rate.burst) +
                           t * static_cast<double>(rate.per_second) + static_cast<double>(most);
    EXPECT_LE(static_cast<double>(taken), allowed * (1 + 1e-9) + 1);
  }
}

TEST(TokenBucket, AClientThatFollowsTheHintsIsServedAtTheRate) {
  TokenBucket bucket({1000, 1});
  TimePoint now = kStart;
  int64_t taken = 0;
  for (int i = 0; i < 1000; ++i) {
    now += bucket.Wait(now);
    bucket.Charge(7, now);
    taken += 7;
  }
  const double t = std::chrono::duration<double>(now - kStart).count();
  EXPECT_NEAR(static_cast<double>(taken) / t, 1000, 10);
}

}  // namespace
}  // namespace attend
