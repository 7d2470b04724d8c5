// SPDX-License-Identifier: Apache-2.0
//
// What of all regions' bytes is whose, where several tenants want them.

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

#include "tests/server/support/region_registry_fixture.h"

namespace attend {
namespace {

using test::kPage;
using test::kReturnWait;
using RegionSharesTest = test::RegionRegistryFixture;

// What nobody else wants, a tenant may have; beyond its share it keeps it only as long.
TEST_F(RegionSharesTest, WhatIsBeyondATenantsShareMakesRoomWithinAnothers) {
  RegionLimits limits{16 * kPage, 8 * kPage, 9};
  limits.tenant_weights = {1, 1};
  Restart(limits);
  const uint64_t one = registry_->AddClient(0);
  const uint64_t two = registry_->AddClient(0);
  const uint64_t other = registry_->AddClient(1);
  std::vector<std::string> tokens;
  for (const uint64_t client : {one, one, two, two}) {
    tokens.push_back(MustCreate(client, 4 * kPage));
  }
  const auto found = [&](int n) { return registry_->Find(tokens[n], 0) != nullptr; };
  EXPECT_TRUE(found(0));  // now the second has been unused for longest
  ExpectRefused(other, 8 * kPage + 1, Code::kInvalidArgument, "shared-memory-client-max");
  EXPECT_EQ(taken(), 16 * kPage) << "what is refused displaces nothing";
  const std::string first = MustCreate(other, 4 * kPage);
  EXPECT_FALSE(found(1));
  MustCreate(other, 1);
  EXPECT_FALSE(found(2));
  EXPECT_TRUE(found(0) && found(3));
  EXPECT_EQ(registry_->stats().displaced, 2);
  EXPECT_EQ(registry_->Release(one, tokens[1]).code(), Code::kNotFound);
  MustCreate(other, 3 * kPage);
  ExpectRefused(registry_->AddClient(1), kPage, Code::kResourceExhausted,
                "has too little left; the tenant has 32768, its share is 32768");
  ExpectRefused(two, kPage, Code::kResourceExhausted, "has too little left");
  ASSERT_TRUE(registry_->Release(other, first).ok());
  MustCreate(two, kPage);  // beyond its share, as long as nobody wants it
  EXPECT_EQ(registry_->stats().displaced, 2);
}

TEST_F(RegionSharesTest, WhatARequestUsesMakesRoomLastAndWhenTheRequestEnds) {
  RegionLimits limits{16 * kPage, 8 * kPage, 9};
  limits.tenant_weights = {1, 1};
  Restart(limits);
  const uint64_t one = registry_->AddClient(0);
  const uint64_t two = registry_->AddClient(0);
  const uint64_t other = registry_->AddClient(1);
  const std::string used = MustCreate(one, 8 * kPage);
  const std::string idle = MustCreate(two, 8 * kPage);
  RegionRef request = registry_->Find(used, 0);
  EXPECT_TRUE(registry_->UseOf(one).in_use);
  EXPECT_TRUE(registry_->UseOf(two) < registry_->UseOf(one));
  MustCreate(other, kPage);
  EXPECT_EQ(registry_->Find(idle, 0), nullptr);
  const std::string more = MustCreate(two, 7 * kPage);
  RegionRef second = registry_->Find(more, 0);
  auto created = std::async(std::launch::async, [&] { return registry_->Create(other, kPage); });
  clock_.AwaitWaiter();
  EXPECT_EQ(registry_->Find(used, 0), nullptr) << "it makes room";
  EXPECT_NE(registry_->Find(more, 0), nullptr) << "one is enough";
  request->data[0] = 'x';  // and is the request's until that ends
  request.reset();
  EXPECT_TRUE(created.get().ok());
  second.reset();
}

TEST_F(RegionSharesTest, ARequestThatDoesNotEndIsWaitedForNoLongerThanItMay) {
  RegionLimits limits{16 * kPage, 16 * kPage, 9};
  limits.tenant_weights = {1, 1};
  Restart(limits);
  const uint64_t one = registry_->AddClient(0);
  const uint64_t other = registry_->AddClient(1);
  const RegionRef request = registry_->Find(MustCreate(one, 16 * kPage), 0);
  auto refused = std::async(std::launch::async, [&] { return registry_->Create(other, kPage); });
  clock_.AwaitWaiter();
  clock_.Advance(kReturnWait);
  EXPECT_EQ(refused.get().status().code(), Code::kResourceExhausted);
  ExpectRefused(other, kPage, Code::kResourceExhausted, "has too little left");  // without a wait
}

}  // namespace
}  // namespace attend
