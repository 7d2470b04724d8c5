// SPDX-License-Identifier: Apache-2.0
//
// What the registry takes from clients that may still read there: it stays as it is until they give
// it up, keeps nobody from a share, and never is more than the bound of all regions.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/problems.h"
#include "tests/server/support/region_registry_fixture.h"

namespace attend {
namespace {

using test::kPage;

class RegionKeptTest : public test::RegionRegistryFixture {
 protected:
  // Two tenants of the same weight.
  RegionKeptTest() {
    Restart({{1, 1}, 16 * kPage, 32 * kPage, 9});
    one_ = registry_->AddClient(0);
    other_ = registry_->AddClient(1);
  }
  int64_t kept() const { return registry_->stats().kept_bytes; }

  uint64_t one_ = 0;
  uint64_t other_ = 0;
};

// Others need not wait for it, but nobody gets more than its share beside it.
TEST_F(RegionKeptTest, WhatMadeRoomIsItsClientsUntilThatGivesItUp) {
  const std::string lost = MustCreate(one_, 16 * kPage);
  const std::string others = MustCreate(other_, 8 * kPage);
  EXPECT_EQ(kept(), 16 * kPage);
  EXPECT_EQ(registry_->Find(lost, 0), nullptr);
  const std::string again = MustCreate(one_, 8 * kPage);
  EXPECT_EQ(memory_.mapped(), 3u);
  ASSERT_TRUE(registry_->Release(other_, others).ok());
  ExpectRefused(one_, kPage, Code::kResourceExhausted,
                "the tenant has 32768, its share is 32768; it has not released 65536 that made "
                "room for others");
  MustCreate(other_, 8 * kPage);
  ExpectRefused(other_, kPage, Code::kResourceExhausted, "too little left");
  EXPECT_EQ(registry_->stats().displaced, 1);
  ASSERT_TRUE(registry_->Release(one_, lost).ok());
  EXPECT_EQ(registry_->Release(one_, lost).code(), Code::kNotFound);
  WaitUntilTaken(16 * kPage);
  EXPECT_EQ(kept(), 0);
  EXPECT_EQ(memory_.kept(), 0) << "what a client gives up is emptied";
  ASSERT_TRUE(registry_->Release(one_, again).ok());
  MustCreate(other_, 8 * kPage);
}

TEST_F(RegionKeptTest, ItGoesWithItsClient) {
  MustCreate(one_, 16 * kPage);
  MustCreate(other_, 8 * kPage);
  registry_->RemoveClient(one_);
  WaitUntilTaken(8 * kPage);
  EXPECT_EQ(kept(), 0);
  EXPECT_EQ(memory_.kept(), 0);
}

TEST_F(RegionKeptTest, TheServersEndLeavesItAsItIs) {
  MustCreate(one_, 16 * kPage);
  MustCreate(other_, 8 * kPage);
  registry_.reset();
  EXPECT_EQ(memory_.kept(), 24 * kPage);
  EXPECT_EQ(memory_.mapped(), 0u);
}

// It counts for its tenant, until others want the room.
TEST_F(RegionKeptTest, WhatAnEndedClientHadMakesRoomBeforeAnythingElse) {
  const uint64_t two = registry_->AddClient(0);
  const std::string lost = MustCreate(one_, 8 * kPage);
  const std::string used = MustCreate(one_, kPage);
  const std::string open = MustCreate(two, 6 * kPage);
  RegionRef request = registry_->Find(used, 0);
  EXPECT_TRUE(registry_->EndClient(one_));
  WaitUntilKept(8 * kPage);
  EXPECT_EQ(registry_->stats().clients, 2);
  EXPECT_EQ(registry_->Find(lost, 0), nullptr);
  EXPECT_FALSE(registry_->Create(one_, kPage).ok()) << "it gets nothing any more";
  ExpectRefused(two, 2 * kPage, Code::kResourceExhausted, "the tenant has 61440");
  TimePoint until = {};
  EXPECT_TRUE(registry_->Create(other_, 8 * kPage, &until).ok()) << "at once";
  EXPECT_EQ(registry_->stats().displaced, 1);
  EXPECT_NE(registry_->Find(open, 0), nullptr);
  request->data[0] = 'a';
  request.reset();
  WaitUntilKept(9 * kPage);
  EXPECT_TRUE(registry_->EndClient(one_)) << "it has some left";
  ASSERT_TRUE(registry_->Release(one_, lost).ok());
  ASSERT_TRUE(registry_->Release(one_, used).ok());
  EXPECT_FALSE(registry_->EndClient(one_));
  registry_->RemoveClient(one_);
  WaitUntilTaken(14 * kPage);
  EXPECT_EQ(kept(), 0);
  EXPECT_EQ(memory_.kept(), 0);
}

// A client may give up what a request still uses, or what is being unlocked.
TEST_F(RegionKeptTest, WhatIsGivenUpOnItsWayIsNotKept) {
  const std::string lost = MustCreate(one_, 16 * kPage);
  RegionRef request = registry_->Find(lost, 0);
  EXPECT_NE(WaitFor(other_, 8 * kPage), TimePoint());
  ASSERT_TRUE(registry_->Release(one_, lost).ok());
  EXPECT_EQ(registry_->stats().changing_bytes, 16 * kPage) << "the request has it";
  request.reset();
  const std::string others = MustCreate(other_, 8 * kPage);
  WaitUntilTaken(8 * kPage);
  ASSERT_TRUE(registry_->Release(other_, others).ok());
  WaitUntilTaken(0);
  const std::string slow = MustCreate(one_, 16 * kPage);
  memory_.Hold();
  EXPECT_NE(WaitFor(other_, 8 * kPage), TimePoint());
  memory_.WaitForUnlocking(3);
  ASSERT_TRUE(registry_->Release(one_, slow).ok());
  memory_.Release();
  MustCreate(other_, 8 * kPage);
  WaitUntilTaken(8 * kPage);
  EXPECT_EQ(memory_.kept(), 0);
}

// Whatever clients do that give up nothing they lost: who is within its share gets it at once, and
// all memory is at most twice the bound.
TEST_F(RegionKeptTest, NothingMakesItMoreThanTheBound) {
  constexpr int64_t kAll = 64 * kPage;
  std::mt19937_64 random(test::FreshSeed());
  int64_t most = 0;
  for (int round = 0; round < 40; ++round) {
    Restart({{1, 2, 5}, kAll, 4 * kAll, 1000});
    const std::vector<int64_t> shares = {kAll / 8, kAll / 4, kAll * 5 / 8};
    std::vector<uint64_t> clients;
    for (int tenant = 0; tenant < 3; ++tenant) clients.push_back(registry_->AddClient(tenant));
    std::vector<std::vector<std::pair<std::string, int64_t>>> open(3);
    for (int step = 0; step < 100; ++step) {
      const auto tenant = static_cast<int>(random() % 3);
      int64_t has = 0;
      std::erase_if(open[tenant],
                    [&](const auto& each) { return !registry_->Find(each.first, tenant); });
      for (const auto& [token, bytes] : open[tenant]) has += bytes;
      if (!open[tenant].empty() && random() % 3 == 0) {
        ASSERT_TRUE(registry_->Release(clients[tenant], open[tenant].back().first).ok());
        open[tenant].pop_back();
        continue;
      }
      const int64_t bytes = static_cast<int64_t>(1 + random() % 32) * kPage;
      const Result<RegionRegistry::Created> created = Create(clients[tenant], bytes);
      if (created.ok()) open[tenant].emplace_back(created->token, bytes);
      if (has + bytes <= shares[tenant]) {
        EXPECT_TRUE(created.ok()) << created.status().ToString();
      }
      const RegionRegistry::Stats stats = registry_->stats();
      ASSERT_LE(stats.bytes, kAll);
      ASSERT_LE(stats.kept_bytes, kAll);
      most = std::max(most, stats.kept_bytes);
    }
  }
  EXPECT_GT(most, kAll / 2) << "the test comes near the bound";
}

TEST_F(RegionKeptTest, TheClaimOfAnEndedClientGoes) {
  MustCreate(other_, kPage);
  const std::string used = MustCreate(one_, 15 * kPage);
  RegionRef request = registry_->Find(used, 0);
  EXPECT_NE(WaitFor(other_, 7 * kPage), TimePoint());
  EXPECT_TRUE(registry_->EndClient(other_));  // it lost its right, or its place, while it waited
  request.reset();
  WaitUntilKept(16 * kPage);
  clock_.Advance(std::chrono::hours(1));
  const uint64_t next = registry_->AddClient(1);
  const auto got = Create(next, 7 * kPage);
  EXPECT_TRUE(got.ok()) << got.status().ToString();
  EXPECT_TRUE(registry_->Release(one_, used).ok());
  WaitUntilTaken(7 * kPage);
  const uint64_t third = registry_->AddClient(0);
  const auto more = Create(third, 8 * kPage);
  EXPECT_TRUE(more.ok()) << more.status().ToString();
}

// Whether its client keeps it or not.
TEST_F(RegionKeptTest, WhatComesLateHoldsUpNobody) {
  for (const char* its_client : {"keeps it", "has released it", "has gone"}) {
    SCOPED_TRACE(its_client);
    Restart({{1, 1, 1}, 24 * kPage, 32 * kPage, 9});
    const uint64_t t = registry_->AddClient(0), u = registry_->AddClient(1),
                   v = registry_->AddClient(2);
    const std::string r1 = MustCreate(t, 12 * kPage);
    const std::string r2 = MustCreate(t, 4 * kPage);
    RegionRef running = registry_->Find(r1, 0);
    RegionRef other = registry_->Find(r2, 0);
    MustCreate(v, 8 * kPage);
    const TimePoint first = WaitFor(u, 8 * kPage);
    EXPECT_NE(first, TimePoint());
    clock_.Advance(test::kReturnWait);
    EXPECT_FALSE(registry_->Create(u, 8 * kPage).ok()) << "refused: r1 runs";
    other.reset();
    ASSERT_TRUE(registry_->Release(t, r2).ok());
    if (its_client == std::string("has released it")) {
      ASSERT_TRUE(registry_->Release(t, r1).ok());
    }
    if (its_client == std::string("has gone")) registry_->RemoveClient(t);
    WaitUntilTaken(20 * kPage);
    const std::string idle = MustCreate(v, 4 * kPage);  // beyond its share
    EXPECT_TRUE(registry_->Find(idle, 2) != nullptr);
    EXPECT_NE(WaitFor(u, 8 * kPage), TimePoint());
    ASSERT_EQ(registry_->stats().displaced, 2) << "v is beyond its share, idle";
    const auto got = Create(u, 8 * kPage);
    EXPECT_TRUE(got.ok()) << got.status().ToString();
    running.reset();
  }
}

}  // namespace
}  // namespace attend
