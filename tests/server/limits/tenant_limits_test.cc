// SPDX-License-Identifier: Apache-2.0

#include "server/limits/tenant_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class TenantLimitsTest : public ::testing::Test {
 protected:
  TenantLimitsTest() : bounds_(2) {}
  ~TenantLimitsTest() override {
    for (int tenant = 0; limits_ && tenant < limits_->tenants(); ++tenant) {
      for (const Limit limit : {Limit::kInFlight, Limit::kChecks, Limit::kStreams,
                                Limit::kSharedMemory, Limit::kSmallCalls}) {
        EXPECT_EQ(limits_->use(tenant, limit).used, 0) << LimitLabel(limit);
      }
    }
  }

  void Start() { limits_.emplace(bounds_, clock_); }
  // Begins and charges.
  Status Enter(int tenant, LimitHold& hold, int64_t bytes = 0, double cost = 0,
               bool check = false) {
    ATTEND_RETURN_IF_ERROR(limits_->Begin(tenant, check, hold));
    return limits_->Charge(bytes, cost, hold);
  }

  test::ManualClock clock_;
  std::vector<TenantBounds> bounds_;
  std::optional<TenantLimits> limits_;
};

TEST_F(TenantLimitsTest, WithoutBoundsEveryRequestIsAcceptedAndCounted) {
  Start();
  std::vector<LimitHold> holds(100);
  for (LimitHold& hold : holds) EXPECT_TRUE(Enter(1, hold, kUnlimited, 1e300, true).ok());
  EXPECT_EQ(limits_->use(1, Limit::kInFlight).used, 100);
  EXPECT_EQ(limits_->use(1, Limit::kChecks).used, 100);
  EXPECT_EQ(limits_->use(0, Limit::kInFlight).used, 0);
  EXPECT_EQ(limits_->use(1, Limit::kBytes).used, 0);
}

TEST_F(TenantLimitsTest, AFullLimitRefusesUntilARequestEnds) {
  bounds_[0][Limit::kInFlight] = 2;
  Start();
  LimitHold one, two, three;
  EXPECT_TRUE(Enter(0, one).ok());
  EXPECT_TRUE(Enter(0, two).ok());
  const Status refused = Enter(0, three);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(),
              HasSubstr("tenant limit requests-in-flight: the tenant has 2, may have at "
                        "most 2"));
  EXPECT_EQ(three.retry_after_ms(), 0);  // unknown
  EXPECT_EQ(limits_->use(0, Limit::kInFlight).refused, 1);
  LimitHold other;
  EXPECT_TRUE(Enter(1, other).ok());  // of another tenant
  one.End(0, true, true);
  EXPECT_TRUE(Enter(0, three).ok());
}

TEST_F(TenantLimitsTest, OnlyRequestsWithACheckCountTowardsChecks) {
  bounds_[0][Limit::kChecks] = 1;
  Start();
  LimitHold plain, checked, refused;
  EXPECT_TRUE(Enter(0, checked, 0, 0, true).ok());
  EXPECT_TRUE(Enter(0, plain).ok());
  EXPECT_THAT(Enter(0, refused, 0, 0, true).message(), HasSubstr("checks: the tenant has 1"));
  EXPECT_EQ(limits_->use(0, Limit::kInFlight).used, 2);  // the refused request is not counted
}

TEST_F(TenantLimitsTest, ARateInDebtHasARetryHint) {
  bounds_[0].bytes = {1000, 1000};
  Start();
  LimitHold hold, late;
  EXPECT_TRUE(Enter(0, hold, 3000).ok());  // above the burst, but accepted
  const Status refused = Enter(0, late, 1);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(),
              HasSubstr("bytes-per-second: the tenant is 2000 over its burst of 1000, at a rate of "
                        "1000 bytes a second; retry in 2000 ms"));
  EXPECT_EQ(late.retry_after_ms(), 2000);
  clock_.Advance(milliseconds(1999));
  EXPECT_FALSE(Enter(0, late, 1).ok());
  EXPECT_EQ(late.retry_after_ms(), 1);
  clock_.Advance(milliseconds(1));
  EXPECT_TRUE(Enter(0, late, 1).ok());
  EXPECT_EQ(limits_->use(0, Limit::kBytes).refused, 2);
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 1001);
  EXPECT_EQ(limits_->use(0, Limit::kBytes).most, 1000);
}

TEST_F(TenantLimitsTest, ALaterChargeOfAnotherRequestCanRefuseThisOne) {
  bounds_[0].cost = {1'000'000, 1'000'000};
  Start();
  LimitHold one, two;
  EXPECT_TRUE(limits_->Begin(0, false, one).ok());
  EXPECT_TRUE(limits_->Begin(0, false, two).ok());
  EXPECT_TRUE(limits_->Charge(0, 1e6 + 1, one).ok());
  const Status refused = limits_->Charge(0, 1, two);
  EXPECT_THAT(refused.message(), HasSubstr("gflop-per-second"));
  EXPECT_EQ(two.retry_after_ms(), 1);  // 1 us, rounded up
}

TEST_F(TenantLimitsTest, UnusedChargesAreReturned) {
  bounds_[0].bytes = bounds_[0].cost = {1000, 1000};
  Start();
  {
    LimitHold dropped;
    EXPECT_TRUE(Enter(0, dropped, 5000, 5000).ok());
  }
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 0);
  EXPECT_EQ(limits_->use(0, Limit::kCost).used, 0);
  LimitHold sent, again;
  EXPECT_TRUE(Enter(0, sent, 5000, 5000).ok());
  sent.End(0, /*bytes_used=*/true, /*cost_used=*/false);
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 5000);
  EXPECT_EQ(limits_->use(0, Limit::kCost).used, 0);
  sent.End(0, false, false);  // it has ended already
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 5000);
  EXPECT_EQ(limits_->use(0, Limit::kInFlight).used, 0);
}

TEST_F(TenantLimitsTest, ReceivedBytesStayCharged) {
  bounds_[0].bytes = {1000, 1'000'000};
  bounds_[0][Limit::kInFlight] = 1;
  Start();
  const auto used = [&] { return limits_->use(0, Limit::kBytes).used; };
  LimitHold first, second;
  EXPECT_TRUE(limits_->Begin(0, false, first, 700).ok());
  EXPECT_EQ(used(), 700) << "before anything else is known of it";
  EXPECT_FALSE(limits_->Begin(0, false, second, 50).ok());
  limits_->Came(0, 50);
  EXPECT_EQ(used(), 750);
  EXPECT_TRUE(limits_->Charge(5000, 0, first).ok());
  EXPECT_EQ(used(), 5050);
  first.End(800, /*bytes_used=*/false, false);
  EXPECT_EQ(used(), 850) << "what of it had come";
  limits_->Came(0, 100);  // of a message that could not be read
  EXPECT_EQ(used(), 950);
}

TEST_F(TenantLimitsTest, ARequestsOwnBytesDoNotRefuseIt) {
  bounds_[0].bytes = {1000, 1000};
  Start();
  LimitHold large, other, late;
  EXPECT_TRUE(limits_->Begin(0, false, other, 10).ok());
  EXPECT_TRUE(limits_->Begin(0, false, large, 3000).ok());
  EXPECT_TRUE(limits_->Charge(3500, 0, large).ok());
  EXPECT_THAT(limits_->Charge(20, 0, other).message(), HasSubstr("bytes-per-second"));
  EXPECT_EQ(other.retry_after_ms(), 2500);
  EXPECT_FALSE(limits_->Begin(0, false, late, 1).ok());
}

// A client that waits as long as it was told is accepted, whatever others send meanwhile. The debt
// of refused requests at most doubles the cost of the accepted ones.
TEST_F(TenantLimitsTest, RefusedBytesBecomeABoundedDebt) {
  bounds_[0].bytes = {1000, 1000};
  Start();
  LimitHold first;
  EXPECT_TRUE(limits_->Begin(0, false, first, 3000).ok());
  first.End(3000, true, true);
  for (int i = 0; i < 100; ++i) {
    LimitHold refused;
    EXPECT_FALSE(limits_->Begin(0, false, refused, kUnlimited).ok());
    EXPECT_EQ(refused.retry_after_ms(), 2000);
    limits_->Came(0, kUnlimited);
  }
  clock_.Advance(seconds(2));
  LimitHold told, next;
  EXPECT_TRUE(limits_->Begin(0, false, told, 500).ok());
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 1000 + 2 * 500);
  EXPECT_TRUE(limits_->Charge(600, 0, told).ok()) << "it was its own";
  told.End(500, /*bytes_used=*/false, true);
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 1000 + 2 * 500);
  clock_.Advance(seconds(1));
  EXPECT_TRUE(limits_->Begin(0, false, next, 500).ok());
  EXPECT_EQ(limits_->use(0, Limit::kBytes).used, 1000 + 500) << "that is paid";
}

// Refused requests do not delay the time that the tenant's first refusal names.
TEST_F(TenantLimitsTest, RequestsSentInDebtDoNotDeepenIt) {
  constexpr int64_t kMegabyte = 1'000'000;
  bounds_[0].bytes = {kMegabyte, kMegabyte};
  Start();
  const auto used = [&] { return limits_->use(0, Limit::kBytes).used; };
  LimitHold first;
  EXPECT_TRUE(limits_->Begin(0, false, first, 3 * kMegabyte).ok());
  first.End(3 * kMegabyte, true, true);
  LimitHold told;
  EXPECT_FALSE(limits_->Begin(0, false, told, 500).ok());
  EXPECT_EQ(told.retry_after_ms(), 2000);
  for (int i = 0; i < 1000; ++i) {
    limits_->Came(0, kMegabyte);
    LimitHold small;
    EXPECT_TRUE(limits_->BeginSmall(0, small, kMegabyte).ok());
    clock_.Advance(milliseconds(2));
  }
  EXPECT_EQ(used(), kMegabyte) << "an empty bucket, and no debt";
  EXPECT_TRUE(limits_->Begin(0, false, told, 500).ok());
  EXPECT_EQ(used(), kMegabyte + 2 * 500) << "with as much again of what is owed";
}

TEST_F(TenantLimitsTest, SmallCallsAreBoundedByDefault) {
  Start();
  std::vector<LimitHold> holds(kSmallCallsDefault);
  for (LimitHold& hold : holds) EXPECT_TRUE(limits_->BeginSmall(0, hold, 0).ok());
  LimitHold more, other, request;
  EXPECT_THAT(limits_->BeginSmall(0, more, 0).message(),
              HasSubstr("small-calls-in-flight: the tenant has 256, may have at most 256"));
  EXPECT_EQ(limits_->use(0, Limit::kSmallCalls).refused, 1);
  EXPECT_TRUE(limits_->BeginSmall(1, other, 0).ok());
  EXPECT_TRUE(Enter(0, request).ok()) << "requests are none";
  LimitHold moved = std::move(holds.back());
  moved.End(0, true, true);
  EXPECT_TRUE(limits_->BeginSmall(0, more, 0).ok());
  EXPECT_EQ(limits_->use(0, Limit::kInFlight).used, kSmallCallsDefault + 1);
}

TEST_F(TenantLimitsTest, AHoldCanBeMoved) {
  Start();
  LimitHold from, to;
  EXPECT_TRUE(Enter(0, from).ok());
  EXPECT_TRUE(Enter(0, to).ok());
  to = std::move(from);
  EXPECT_EQ(limits_->use(0, Limit::kInFlight).used, 1);
}

TEST_F(TenantLimitsTest, NewBoundsApplyAtOnceButNotToRequestsInFlight) {
  Start();
  std::vector<LimitHold> holds(5);
  for (LimitHold& hold : holds) EXPECT_TRUE(Enter(0, hold, 1000, 1000).ok());
  bounds_[0][Limit::kInFlight] = 2;
  bounds_[0].bytes = {10, 10};
  limits_->Set(bounds_);
  LimitHold more;
  EXPECT_THAT(Enter(0, more).message(), HasSubstr("the tenant has 5, may have at most 2"));
  holds.resize(2);
  EXPECT_FALSE(Enter(0, more).ok());
  holds.resize(1);
  EXPECT_TRUE(Enter(0, more, 15).ok());
  more.End(0, true, true);
  EXPECT_FALSE(Enter(0, more).ok());
  bounds_[0].bytes = {};
  limits_->Set(bounds_);
  EXPECT_TRUE(Enter(0, more).ok());
}

TEST_F(TenantLimitsTest, CountedLimitsRefuseByNameAndBound) {
  bounds_[1][Limit::kStreams] = 1;
  Start();
  CountHold one, two, other;
  EXPECT_TRUE(limits_->Take(1, Limit::kStreams, one).ok());
  EXPECT_THAT(limits_->Take(1, Limit::kStreams, two).message(),
              HasSubstr("tenant limit streams: the tenant has 1, may have at most 1"));
  EXPECT_TRUE(limits_->Take(0, Limit::kStreams, other).ok());
  EXPECT_EQ(limits_->use(1, Limit::kStreams).refused, 1);
  two = std::move(one);
  one.Release();  // it has been moved from
  EXPECT_EQ(limits_->use(1, Limit::kStreams).used, 1);
  two.Release();
  two.Release();
  EXPECT_EQ(limits_->use(1, Limit::kStreams).used, 0);
  EXPECT_TRUE(limits_->Take(1, Limit::kStreams, one).ok());
  limits_->CountRefusal(1, Limit::kSessionMemory);
  EXPECT_EQ(limits_->use(1, Limit::kSessionMemory).refused, 1);
  EXPECT_EQ(limits_->most(1, Limit::kStreams), 1);
}

TEST_F(TenantLimitsTest, LimitsInBytesRefuseByNameAndBound) {
  bounds_[0][Limit::kSharedMemory] = 100;
  Start();
  CountHold one, two;
  EXPECT_TRUE(limits_->Take(0, Limit::kSharedMemory, one, 60).ok());
  EXPECT_FALSE(limits_->Fits(0, Limit::kSharedMemory, 41));
  EXPECT_THAT(limits_->Take(0, Limit::kSharedMemory, two, 41).message(),
              HasSubstr("tenant limit shared-memory: the tenant has 60 and asks for 41 more, may "
                        "have at most 100"));
  EXPECT_EQ(limits_->use(0, Limit::kSharedMemory).refused, 1);  // Fits does not count refusals
  EXPECT_TRUE(limits_->Fits(0, Limit::kSharedMemory, 40));
  EXPECT_TRUE(limits_->Take(0, Limit::kSharedMemory, two, 40).ok());
  bounds_[0][Limit::kSharedMemory] = 10;
  limits_->Set(bounds_);
  EXPECT_FALSE(limits_->Fits(0, Limit::kSharedMemory, 1));
  one = std::move(two);
  EXPECT_EQ(limits_->use(0, Limit::kSharedMemory).used, 40);
  one.Release();
  EXPECT_EQ(limits_->use(0, Limit::kSharedMemory).used, 0);
  EXPECT_FALSE(limits_->Fits(0, Limit::kSharedMemory, 11));
  EXPECT_TRUE(limits_->Fits(1, Limit::kSharedMemory, kUnlimited));
}

// Many threads while bounds change: usage never exceeds the highest bound, and returns to zero.
TEST_F(TenantLimitsTest, BoundsHoldUnderManyThreads) {
  constexpr int64_t kBound = 3;
  bounds_[0][Limit::kInFlight] = kBound;
  Start();
  std::atomic<int64_t> in = 0, most = 0, entered = 0;
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        LimitHold hold;
        if (!Enter(0, hold, 1, 1).ok()) continue;
        ++entered;
        const int64_t now = ++in;
        for (int64_t seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        --in;
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    bounds_[0][Limit::kInFlight] = 1 + i % kBound;
    bounds_[0].bytes = i % 2 == 0 ? Rate{} : Rate{1'000'000'000, 1'000'000'000};
    limits_->Set(bounds_);
    clock_.Advance(milliseconds(1));
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(entered, 0);
  EXPECT_LE(most, kBound);
}

}  // namespace
}  // namespace attend
