// SPDX-License-Identifier: Apache-2.0

#include "server/limits/connection_holds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
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
    holds_ = std::make_shared<ConnectionHolds>(*limits_);
  }
  int64_t used(int tenant) const { return limits_->use(tenant, Limit::kConnections).used; }

  test::ManualClock clock_;
  std::optional<TenantLimits> limits_;
  std::shared_ptr<ConnectionHolds> holds_;
};

TEST_F(ConnectionHoldsTest, AConnectionCountsFromItsFirstCallUntilItsClose) {
  ConnectionHolds::Ref a = holds_->Begin("a");
  EXPECT_EQ(used(0), 0);  // no call yet
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(holds_->Call("a", 0).ok());
  EXPECT_EQ(used(0), 1);
  const ConnectionHolds::Ref b = holds_->Begin("b");
  EXPECT_TRUE(holds_->Call("b", 0).ok());
  const ConnectionHolds::Ref c = holds_->Begin("c");
  EXPECT_THAT(holds_->Call("c", 0).message(),
              HasSubstr("tenant limit connections: the tenant has 2, may have at most 2"));
  EXPECT_TRUE(holds_->Call("a", 0).ok());  // existing connections stay
  EXPECT_TRUE(holds_->Call("c", 1).ok());
  EXPECT_EQ(limits_->use(0, Limit::kConnections).refused, 1);
  a.reset();
  EXPECT_EQ(used(0), 1);
  EXPECT_TRUE(holds_->Call("c", 0).ok());
}

TEST_F(ConnectionHoldsTest, AConnectionIsAuthenticatedOnceACallIsAccepted) {
  std::vector<ConnectionHolds::Ref> refs;
  for (const char* const name : {"a", "b", "c", "d"}) refs.push_back(holds_->Begin(name));
  const auto called = [&](size_t n) { return refs[n]->marks()->called.load(); };
  EXPECT_TRUE(holds_->Call("a", 0).ok());
  EXPECT_TRUE(holds_->Call("b", 0).ok());
  EXPECT_FALSE(holds_->Call("c", 0).ok());
  EXPECT_TRUE(called(0));
  EXPECT_TRUE(called(1));
  EXPECT_FALSE(called(2)) << "its call was refused";
  holds_->CallUncounted("d");
  holds_->CallUncounted("unknown");
  EXPECT_TRUE(called(3));
  EXPECT_EQ(used(0), 2);
  refs.push_back(holds_->Begin("a"));
  EXPECT_TRUE(called(4)) << "the same connection";
}

TEST_F(ConnectionHoldsTest, WithoutValidCredentialsAConnectionIsUnauthenticatedAgain) {
  const ConnectionHolds::Credential first{1}, second{2}, third{3};
  std::vector<ConnectionHolds::Ref> refs;
  for (const char* const name : {"one", "two", "anyone", "none"}) {
    refs.push_back(holds_->Begin(name));
  }
  const auto called = [&] {
    std::vector<bool> all;
    for (const ConnectionHolds::Ref& ref : refs) all.push_back(ref->marks()->called);
    return all;
  };
  EXPECT_TRUE(holds_->Call("one", 0, first).ok());
  EXPECT_TRUE(holds_->Call("two", 0, first).ok());
  // the connection counts for that tenant already
  EXPECT_TRUE(holds_->Call("two", 0, second).ok());
  EXPECT_TRUE(holds_->Call("anyone", 1).ok());
  holds_->CallUncounted("anyone", first);
  holds_->Recheck({first, second, third});
  EXPECT_THAT(called(), ElementsAre(true, true, true, false));
  holds_->Recheck({second, third});
  EXPECT_THAT(called(), ElementsAre(false, true, true, false));
  EXPECT_EQ(used(0), 2) << "it is open";
  holds_->Recheck({first});  // a forgotten credential does not come back
  EXPECT_THAT(called(), ElementsAre(false, false, true, false));
  EXPECT_TRUE(holds_->Call("one", 0, third).ok());
  EXPECT_THAT(called(), ElementsAre(true, false, true, false));
}

TEST_F(ConnectionHoldsTest, ABoundedNumberOfCredentialsIsRemembered) {
  const ConnectionHolds::Ref open = holds_->Begin("a");
  std::set<ConnectionHolds::Credential> all;
  for (uint8_t i = 1; i < 100; ++i) {
    const ConnectionHolds::Credential caller{i};
    all.insert(caller);
    EXPECT_TRUE(holds_->Call("a", 0, caller).ok());
  }
  holds_->Recheck(all);
  EXPECT_TRUE(open->marks()->called);
  for (uint8_t i = 1; i <= ConnectionHolds::kCallersMax; ++i) {
    all.erase(ConnectionHolds::Credential{i});
  }
  holds_->Recheck(all);
  EXPECT_FALSE(open->marks()->called);
  EXPECT_TRUE(holds_->Call("a", 0, {99}).ok());
  EXPECT_TRUE(open->marks()->called);
}

TEST_F(ConnectionHoldsTest, OneConnectionOfSeveralTenantsCountsForEach) {
  ConnectionHolds::Ref proxy = holds_->Begin("proxy");
  EXPECT_TRUE(holds_->Call("proxy", 0).ok());
  EXPECT_TRUE(holds_->Call("proxy", 1).ok());
  EXPECT_EQ(used(0), 1);
  EXPECT_EQ(used(1), 1);
  proxy.reset();
  EXPECT_EQ(used(0), 0);
  EXPECT_EQ(used(1), 0);
}

TEST_F(ConnectionHoldsTest, CallsOfAClosedConnectionAreNotCounted) {
  ConnectionHolds::Ref a = holds_->Begin("a");
  a.reset();
  EXPECT_TRUE(holds_->Call("a", 0).ok());
  EXPECT_EQ(used(0), 0);
}

TEST_F(ConnectionHoldsTest, ANameCountsUntilItsLastConnectionCloses) {
  ConnectionHolds::Ref old = holds_->Begin("a");
  const ConnectionHolds::Ref later = holds_->Begin("a");
  EXPECT_TRUE(holds_->Call("a", 0).ok());
  old.reset();
  EXPECT_EQ(used(0), 1);
}

TEST_F(ConnectionHoldsTest, ConnectionsMayOutliveIt) {
  const ConnectionHolds::Ref a = holds_->Begin("a");
  EXPECT_TRUE(holds_->Call("a", 0).ok());
  holds_.reset();
  EXPECT_EQ(used(0), 0);
}

TEST_F(ConnectionHoldsTest, CountsAreRightUnderManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 2000; ++i) {
        const std::string name = std::to_string((t + i) % 3);
        const ConnectionHolds::Ref open = holds_->Begin(name);
        (void)holds_->Call(name, 0);
        EXPECT_TRUE(holds_->Call(name, 1).ok());
        EXPECT_LE(used(0), 2);
        EXPECT_GE(used(1), 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(used(0), 0);
  EXPECT_EQ(used(1), 0);
}

}  // namespace
}  // namespace attend
