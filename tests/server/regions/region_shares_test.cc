// SPDX-License-Identifier: Apache-2.0
//
// What of all regions' bytes is whose, where several tenants want them.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/server/support/region_registry_fixture.h"

namespace attend {
namespace {

using test::kPage;
using test::kReturnWait;

class RegionSharesTest : public test::RegionRegistryFixture {
 protected:
  // Two tenants of the same weight; the first has two clients.
  void RestartForTwo(int64_t client_bytes_max) {
    Restart({{1, 1}, 16 * kPage, client_bytes_max, 9});
    one_ = registry_->AddClient(0);
    two_ = registry_->AddClient(0);
    other_ = registry_->AddClient(1);
  }

  uint64_t one_ = 0;
  uint64_t two_ = 0;
  uint64_t other_ = 0;
};

// What nobody else wants, a tenant may have; beyond its share it keeps it only as long.
TEST_F(RegionSharesTest, WhatIsBeyondATenantsShareMakesRoomWithinAnothers) {
  RestartForTwo(8 * kPage);
  std::vector<std::string> tokens;
  for (const uint64_t client : {one_, one_, two_, two_}) {
    tokens.push_back(MustCreate(client, 4 * kPage));
  }
  const auto found = [&](int n) { return registry_->Find(tokens[n], 0) != nullptr; };
  EXPECT_TRUE(found(0));  // now the second has been unused for longest
  ExpectRefused(other_, 8 * kPage + 1, Code::kInvalidArgument, "shared-memory-client-max");
  EXPECT_EQ(taken(), 16 * kPage) << "what is refused displaces nothing";
  const std::string first = MustCreate(other_, 4 * kPage);
  EXPECT_FALSE(found(1));
  MustCreate(other_, 1);
  EXPECT_FALSE(found(2));
  EXPECT_TRUE(found(0) && found(3));
  EXPECT_EQ(registry_->stats().displaced, 2);
  EXPECT_EQ(registry_->stats().kept_bytes, 8 * kPage) << "their clients may still read there";
  MustCreate(other_, 3 * kPage);
  ExpectRefused(registry_->AddClient(1), kPage, Code::kResourceExhausted,
                "has too little left; the tenant has 32768, its share is 32768");
  ASSERT_TRUE(registry_->Release(two_, tokens[2]).ok());
  ExpectRefused(two_, kPage, Code::kResourceExhausted, "has too little left");
  ASSERT_TRUE(registry_->Release(one_, tokens[1]).ok());
  ASSERT_TRUE(registry_->Release(other_, first).ok());
  MustCreate(two_, kPage);  // beyond its share, as long as nobody wants it
  EXPECT_EQ(registry_->stats().displaced, 2);
}

// What is being closed comes back anyway.
TEST_F(RegionSharesTest, NobodyLosesARegionForBytesThatAreComingBack) {
  RestartForTwo(16 * kPage);
  const std::string stays = MustCreate(two_, 8 * kPage);
  const std::string released = MustCreate(one_, 8 * kPage);
  memory_.Hold();
  ASSERT_TRUE(registry_->Release(one_, released).ok());
  memory_.WaitForUnlocking(1);
  EXPECT_NE(WaitFor(other_, 8 * kPage), TimePoint());
  memory_.Release();
  MustCreate(other_, 8 * kPage);
  EXPECT_NE(registry_->Find(stays, 0), nullptr);
  EXPECT_EQ(registry_->stats().displaced, 0);
}

TEST_F(RegionSharesTest, WhatARequestUsesMakesRoomLastAndWhenTheRequestEnds) {
  RestartForTwo(8 * kPage);
  const std::string used = MustCreate(one_, 8 * kPage);
  const std::string idle = MustCreate(two_, 8 * kPage);
  RegionRef request = registry_->Find(used, 0);
  EXPECT_TRUE(registry_->UseOf(one_).in_use);
  EXPECT_TRUE(registry_->UseOf(two_) < registry_->UseOf(one_));
  MustCreate(other_, kPage);
  EXPECT_EQ(registry_->Find(idle, 0), nullptr);
  ASSERT_TRUE(registry_->Release(two_, idle).ok());
  const std::string more = MustCreate(two_, 7 * kPage);
  RegionRef second = registry_->Find(more, 0);
  const TimePoint until = clock_.Now() + kReturnWait;
  EXPECT_EQ(WaitFor(other_, kPage), until);
  EXPECT_EQ(registry_->Find(used, 0), nullptr) << "it makes room";
  EXPECT_NE(registry_->Find(more, 0), nullptr) << "one is enough";
  clock_.Advance(kReturnWait / 2);
  EXPECT_EQ(WaitFor(other_, kPage), until) << "asking again makes the wait no longer";
  request->data[0] = 'x';  // and is the request's until that ends
  request.reset();
  MustCreate(other_, kPage);
  second.reset();
}

TEST_F(RegionSharesTest, ARequestThatDoesNotEndIsWaitedForNoLongerThanItMay) {
  RestartForTwo(16 * kPage);
  const RegionRef request = registry_->Find(MustCreate(one_, 16 * kPage), 0);
  EXPECT_NE(WaitFor(other_, kPage), TimePoint());
  clock_.Advance(kReturnWait);
  ExpectRefused(other_, kPage, Code::kResourceExhausted, "has too little left");
  EXPECT_NE(WaitFor(other_, kPage), TimePoint()) << "the room still belongs to it";
}

// Who makes room cannot take it again, however small what it asks for; others within their share
// may.
TEST_F(RegionSharesTest, WhoIsBeyondItsShareLeavesTheRoomThatAnotherWaitsFor) {
  RestartForTwo(16 * kPage);
  std::vector<RegionRef> requests;
  for (int n = 0; n < 8; ++n) {
    requests.push_back(registry_->Find(MustCreate(n % 2 == 0 ? one_ : two_, 2 * kPage), 0));
  }
  const uint64_t second = registry_->AddClient(1);
  EXPECT_NE(WaitFor(other_, 6 * kPage), TimePoint());
  EXPECT_EQ(registry_->stats().displaced, 3);
  EXPECT_NE(WaitFor(second, 2 * kPage), TimePoint());
  EXPECT_EQ(registry_->stats().displaced, 4) << "both may have what they ask for";
  const uint64_t third = registry_->AddClient(1);
  EXPECT_EQ(WaitFor(third, kPage), TimePoint()) << "its tenant's share is asked for already";
  EXPECT_EQ(registry_->stats().displaced, 4);
  requests[0].reset();
  WaitUntilTaken(14 * kPage);
  ExpectRefused(one_, 1, Code::kResourceExhausted, "has too little left");
  MustCreate(second, 2 * kPage);
  for (int n = 1; n < 4; ++n) {
    requests[n].reset();
    WaitUntilTaken((16 - 2 * n) * kPage);
    ExpectRefused(one_, 1, Code::kResourceExhausted, "has too little left");
  }
  MustCreate(other_, 6 * kPage);
  EXPECT_EQ(registry_->stats().displaced, 4);
}

// What is released is its tenant's until no request uses it, and not a way around the share.
TEST_F(RegionSharesTest, WhatIsReleasedAndStillInUseCountsAmongItsTenants) {
  RestartForTwo(16 * kPage);
  std::vector<RegionRef> requests;
  for (int n = 0; n < 2; ++n) {
    const std::string token = MustCreate(one_, 8 * kPage);
    requests.push_back(registry_->Find(token, 0));
    ASSERT_TRUE(registry_->Release(one_, token).ok());
  }
  EXPECT_EQ(WaitFor(two_, kPage), TimePoint()) << "its tenant has all that it may";
  EXPECT_EQ(WaitFor(other_, 8 * kPage), clock_.Now() + kReturnWait);
  requests[0].reset();
  WaitUntilTaken(8 * kPage);
  ExpectRefused(two_, kPage, Code::kResourceExhausted, "the tenant has 32768, its share is 32768");
  MustCreate(other_, 8 * kPage);
  EXPECT_EQ(registry_->stats().displaced, 0);
}

// As long as a tenant has enough that no request uses, nobody waits for a request.
TEST_F(RegionSharesTest, WhatNoRequestUsesMakesRoomBeforeWhatIsReleasedAndStillInUse) {
  RestartForTwo(16 * kPage);
  const std::string used = MustCreate(one_, 8 * kPage);
  const RegionRef request = registry_->Find(used, 0);
  ASSERT_TRUE(registry_->Release(one_, used).ok());
  std::vector<std::string> idle;
  for (int n = 0; n < 4; ++n) idle.push_back(MustCreate(one_, 2 * kPage));
  const auto found = [&](int n) { return registry_->Find(idle[n], 0) != nullptr; };
  EXPECT_TRUE(found(0));
  MustCreate(other_, 4 * kPage);
  EXPECT_EQ(registry_->stats().displaced, 2);
  EXPECT_TRUE(found(0) && found(3)) << "no more than is needed";
  MustCreate(other_, 4 * kPage);
  EXPECT_EQ(registry_->stats().displaced, 4);
}

// A claim ends with the wait, with what was asked for, and with the client.
TEST_F(RegionSharesTest, WhoNoLongerWaitsLeavesTheRoomToOthers) {
  RestartForTwo(16 * kPage);
  std::string lost = MustCreate(one_, 16 * kPage);
  RegionRef request = registry_->Find(lost, 0);
  EXPECT_NE(WaitFor(other_, 8 * kPage), TimePoint());
  registry_->RemoveClient(other_);
  request.reset();
  ASSERT_TRUE(registry_->Release(one_, lost).ok());
  lost = MustCreate(one_, 16 * kPage);
  request = registry_->Find(lost, 0);
  const uint64_t second = registry_->AddClient(1);
  EXPECT_NE(WaitFor(second, 8 * kPage), TimePoint());
  clock_.Advance(kReturnWait);
  EXPECT_EQ(WaitFor(second, 8 * kPage), TimePoint());
  request.reset();
  ASSERT_TRUE(registry_->Release(one_, lost).ok());
  MustCreate(one_, 16 * kPage);
}

}  // namespace
}  // namespace attend
