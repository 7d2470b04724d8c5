// SPDX-License-Identifier: Apache-2.0

#include "server/memory/ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

TEST(LedgerTest, ALoneTenantMayHoldEverything) {
  Ledger ledger(7, {3});
  EXPECT_EQ(ledger.Room(0), 7);
  EXPECT_EQ(ledger.most(0), 7);
  ledger.Add(0, 7);
  EXPECT_EQ(ledger.Room(0), 0);
  ledger.Add(0, -2);
  EXPECT_EQ(ledger.Room(0), 2);
}

TEST(LedgerTest, HalfIsDividedByWeightAndTheRestIsFirstComeFirstServed) {
  Ledger ledger(16, {3, 1});
  EXPECT_EQ(ledger.own(0), 6);
  EXPECT_EQ(ledger.own(1), 2);
  EXPECT_EQ(ledger.most(0), 14);
  ledger.Add(0, 14);
  EXPECT_EQ(ledger.Beyond(0), 8);
  EXPECT_EQ(ledger.Room(0), 0);
  EXPECT_EQ(ledger.Room(1), 2) << "its own part";
  ledger.Add(0, -3);
  EXPECT_EQ(ledger.Room(1), 5);
  ledger.Add(1, 5);
  EXPECT_EQ(ledger.Beyond(1), 3);
  EXPECT_EQ(ledger.Room(0), 0);
  EXPECT_EQ(ledger.held(), 16);
}

TEST(LedgerTest, SharesRoundDown) {
  const Ledger ledger(11, {1, 1, 1});
  for (int tenant = 0; tenant < 3; ++tenant) EXPECT_EQ(ledger.own(tenant), 1);
  EXPECT_EQ(ledger.most(0), 9);
}

TEST(LedgerTest, TheSmallestWeightHasAPlace) {
  const Ledger ledger(256, {1000, 1, 0});
  EXPECT_EQ(ledger.own(0), 127);
  EXPECT_EQ(ledger.own(1), 1);
  EXPECT_EQ(ledger.own(2), 0);
  EXPECT_EQ(ledger.most(2), 128);
  const Ledger few(5, {1000, 1, 1});
  EXPECT_EQ(few.own(1), 0);
  EXPECT_EQ(few.most(1), 4);
}

TEST(LedgerTest, TheOnlyTenantWithAWeightMayHoldEverything) {
  const Ledger ledger(7, {3, 0, 0});
  EXPECT_EQ(ledger.most(0), 7);
}

// Each tenant can take its own part at any time, and the total is never exceeded.
TEST(LedgerTest, ATenantsOwnPartIsAlwaysAvailable) {
  std::mt19937_64 random(test::FreshSeed());
  const auto range = [&](int64_t high) {
    return std::uniform_int_distribution<int64_t>(0, high)(random);
  };
  Ledger ledger(1000, {5, 1, 2});
  for (int step = 0; step < 100'000; ++step) {
    const int tenant = static_cast<int>(range(2));
    const bool more = range(2) > 0;
    ledger.Add(tenant, more ? range(ledger.Room(tenant)) : -range(ledger.held(tenant)));
    int64_t held = 0;
    for (int each = 0; each < 3; ++each) {
      ASSERT_GE(ledger.Room(each), ledger.own(each) - ledger.held(each));
      ASSERT_LE(ledger.held(each), ledger.most(each));
      held += ledger.held(each);
    }
    ASSERT_EQ(ledger.held(), held);
    ASSERT_LE(held, ledger.all());
  }
}

}  // namespace
}  // namespace attend
