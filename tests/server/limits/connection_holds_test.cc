// SPDX-License-Identifier: Apache-2.0

#include "server/limits/connection_holds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ConnectionHoldsTest : public ::testing::Test {
 protected:
  ConnectionHoldsTest() {
    std::vector<TenantBounds> bounds(2);
    bounds[0][Limit::kConnections] = 2;
    limits_.emplace(bounds, clock_);
    holds_.emplace(*limits_);
  }
  int64_t used(int tenant) const { return limits_->use(tenant, Limit::kConnections).used; }

  test::ManualClock clock_;
  std::optional<TenantLimits> limits_;
  std::optional<ConnectionHolds> holds_;
};

TEST_F(ConnectionHoldsTest, AConnectionCountsFromItsFirstCallUntilItsClose) {
  const ConnectionHolds::Ref a = holds_->Begin();
  EXPECT_EQ(used(0), 0);  // no call yet
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(a->Call(0).ok());
  EXPECT_EQ(used(0), 1);
  const ConnectionHolds::Ref b = holds_->Begin();
  EXPECT_TRUE(b->Call(0).ok());
  const ConnectionHolds::Ref c = holds_->Begin();
  EXPECT_THAT(c->Call(0).message(),
              HasSubstr("tenant limit connections: the tenant has 2, may have at most 2"));
  EXPECT_TRUE(a->Call(0).ok());  // existing connections stay
  EXPECT_TRUE(c->Call(1).ok());
  EXPECT_EQ(limits_->use(0, Limit::kConnections).refused, 1);
  a->Close();
  EXPECT_EQ(used(0), 1);
  EXPECT_TRUE(c->Call(0).ok());
}

TEST_F(ConnectionHoldsTest, AConnectionIsAuthenticatedOnceACallIsAccepted) {
  std::vector<ConnectionHolds::Ref> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(holds_->Begin());
  const auto called = [&](size_t n) { return refs[n]->marks()->called.load(); };
  EXPECT_TRUE(refs[0]->Call(0).ok());
  EXPECT_TRUE(refs[1]->Call(0).ok());
  EXPECT_FALSE(refs[2]->Call(0).ok());
  EXPECT_TRUE(called(0));
  EXPECT_TRUE(called(1));
  EXPECT_FALSE(called(2)) << "its call was refused";
  refs[3]->CallUncounted();
  EXPECT_TRUE(called(3));
  EXPECT_EQ(used(0), 2);
}

TEST_F(ConnectionHoldsTest, WithoutValidCredentialsAConnectionIsUnauthenticatedAgain) {
  const ConnectionHolds::Credential first{1}, second{2}, third{3};
  const ConnectionHolds::Ref one = holds_->Begin(), two = holds_->Begin();
  const ConnectionHolds::Ref anyone = holds_->Begin(), none = holds_->Begin();
  const auto called = [&] {
    std::vector<bool> all;
    for (const auto& each : {one, two, anyone, none}) all.push_back(each->marks()->called);
    return all;
  };
  EXPECT_TRUE(one->Call(0, first).ok());
  EXPECT_TRUE(two->Call(0, first).ok());
  // the connection counts for that tenant already
  EXPECT_TRUE(two->Call(0, second).ok());
  EXPECT_TRUE(anyone->Call(1).ok());
  anyone->CallUncounted(first);
  holds_->Recheck({first, second, third});
  EXPECT_THAT(called(), ElementsAre(true, true, true, false));
  holds_->Recheck({second, third});
  EXPECT_THAT(called(), ElementsAre(false, true, true, false));
  EXPECT_EQ(used(0), 2) << "it is open";
  holds_->Recheck({first});  // a forgotten credential does not come back
  EXPECT_THAT(called(), ElementsAre(false, false, true, false));
  EXPECT_TRUE(one->Call(0, third).ok());
  EXPECT_THAT(called(), ElementsAre(true, false, true, false));
}

TEST_F(ConnectionHoldsTest, ABoundedNumberOfCredentialsIsRemembered) {
  const ConnectionHolds::Ref open = holds_->Begin();
  std::set<ConnectionHolds::Credential> all;
  for (uint8_t i = 1; i < 100; ++i) {
    const ConnectionHolds::Credential caller{i};
    all.insert(caller);
    EXPECT_TRUE(open->Call(0, caller).ok());
  }
  holds_->Recheck(all);
  EXPECT_TRUE(open->marks()->called);
  for (uint8_t i = 1; i <= ConnectionHolds::kCallersMax; ++i) {
    all.erase(ConnectionHolds::Credential{i});
  }
  holds_->Recheck(all);
  EXPECT_FALSE(open->marks()->called);
  EXPECT_TRUE(open->Call(0, {99}).ok());
  EXPECT_TRUE(open->marks()->called);
}

TEST_F(ConnectionHoldsTest, OneConnectionOfSeveralTenantsCountsForEach) {
  ConnectionHolds::Ref proxy = holds_->Begin();
  EXPECT_TRUE(proxy->Call(0).ok());
  EXPECT_TRUE(proxy->Call(1).ok());
  EXPECT_EQ(used(0), 1);
  EXPECT_EQ(used(1), 1);
  proxy.reset();
  EXPECT_EQ(used(0), 0);
  EXPECT_EQ(used(1), 0);
}

TEST_F(ConnectionHoldsTest, CallsOfAClosedConnectionAreNotCounted) {
  const ConnectionHolds::Ref a = holds_->Begin();
  EXPECT_TRUE(a->Call(0).ok());
  a->Close();
  EXPECT_TRUE(a->Call(0).ok());
  EXPECT_EQ(used(0), 0);
}

TEST_F(ConnectionHoldsTest, ConnectionsMayOutliveIt) {
  const ConnectionHolds::Ref a = holds_->Begin();
  holds_.reset();
  EXPECT_TRUE(a->Call(0).ok());
  EXPECT_EQ(used(0), 1);
}

TEST_F(ConnectionHoldsTest, CountsAreRightUnderManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      for (int i = 0; i < 2000; ++i) {
        const ConnectionHolds::Ref open = holds_->Begin();
        (void)open->Call(0);
        EXPECT_TRUE(open->Call(1).ok());
        EXPECT_LE(used(0), 2);
        EXPECT_GE(used(1), 1);
        if (i % 100 == 0) holds_->Recheck({});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(used(0), 0);
  EXPECT_EQ(used(1), 0);
}

}  // namespace
}  // namespace attend
