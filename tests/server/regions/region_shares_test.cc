// SPDX-License-Identifier: Apache-2.0
//
// How many bytes of regions each tenant may have when several compete, and what happens to a
// client's regions when the server ends it.

#include <gtest/gtest.h>

#include <string>

#include "tests/server/support/region_registry_fixture.h"

namespace attend {
namespace {

using test::kPage;

class RegionSharesTest : public test::RegionRegistryFixture {
 protected:
  // Two tenants of equal weight: of 16 pages, 4 are reserved for each and 8 are common.
  RegionSharesTest() {
    Restart({{1, 1}, 16 * kPage, 16 * kPage, 9});
    one_ = registry_->AddClient(0);
    two_ = registry_->AddClient(0);
    other_ = registry_->AddClient(1);
  }

  uint64_t one_ = 0;
  uint64_t two_ = 0;
  uint64_t other_ = 0;
};

TEST_F(RegionSharesTest, ATenantsPartIsReservedAndTheRestIsFirstComeFirstServed) {
  const std::string first = MustCreate(one_, 8 * kPage), second = MustCreate(two_, 4 * kPage);
  ExpectRefused(two_, 1, Code::kResourceExhausted,
                "too little of the limit for all regions (shared-memory-max), 65536, is free; the "
                "tenant has 49152, its reserved share is 16384");
  const std::string others = MustCreate(other_, 4 * kPage);
  ExpectRefused(other_, 1, Code::kResourceExhausted, "the tenant has 16384");
  EXPECT_NE(registry_->Find(first, 0), nullptr);
  EXPECT_NE(registry_->Find(second, 0), nullptr) << "none makes room for another's";
  ASSERT_TRUE(registry_->Release(one_, first).ok());
  MustCreate(other_, 8 * kPage);
  ExpectRefused(one_, kPage, Code::kResourceExhausted, "too little of the limit");
  ASSERT_TRUE(registry_->Release(other_, others).ok());
  MustCreate(one_, 4 * kPage);
}

TEST_F(RegionSharesTest, AReleasedRegionCountsForItsTenantUntilItIsClosed) {
  const std::string token = MustCreate(one_, 12 * kPage);
  RegionRef request = registry_->Find(token, 0);
  ASSERT_TRUE(registry_->Release(one_, token).ok());
  EXPECT_EQ(registry_->stats().changing_bytes, 12 * kPage);
  EXPECT_EQ(WaitFor(two_, kPage), TimePoint()) << "nothing waits for a request";
  MustCreate(other_, 4 * kPage);
  EXPECT_EQ(WaitFor(other_, kPage), TimePoint());
  request.reset();
  MustCreate(other_, 8 * kPage);
}

// They may hold an answer that the client has not read.
TEST_F(RegionSharesTest, AnEndedClientsRegionsStayUntilItGivesThemUp) {
  const std::string lost = MustCreate(one_, 8 * kPage), used = MustCreate(one_, 4 * kPage);
  RegionRef request = registry_->Find(used, 0);
  EXPECT_TRUE(registry_->EndClient(one_));
  EXPECT_EQ(registry_->stats().clients, 2);
  EXPECT_EQ(registry_->Find(lost, 0), nullptr);
  EXPECT_FALSE(registry_->Create(one_, kPage).ok()) << "it gets nothing any more";
  ExpectRefused(two_, kPage, Code::kResourceExhausted, "the tenant has 49152");
  EXPECT_EQ(registry_->stats().bytes, 12 * kPage);
  ASSERT_TRUE(registry_->Release(one_, lost).ok());
  EXPECT_EQ(registry_->Release(one_, lost).code(), Code::kNotFound);
  EXPECT_TRUE(registry_->EndClient(one_)) << "it has some left";
  ASSERT_TRUE(registry_->Release(one_, used).ok());
  EXPECT_FALSE(registry_->EndClient(one_));
  request->data[0] = 'a';
  request.reset();
  WaitUntilTaken(0);
  EXPECT_EQ(memory_.kept(), 0) << "what a client gives up is emptied";
}

TEST_F(RegionSharesTest, AnEndedClientsRegionsGoWhenItDisconnects) {
  MustCreate(one_, 8 * kPage);
  EXPECT_TRUE(registry_->EndClient(one_));
  registry_->RemoveClient(one_);
  WaitUntilTaken(0);
  EXPECT_EQ(memory_.kept(), 0);
}

TEST_F(RegionSharesTest, TheServersEndDoesNotEmptyRegions) {
  MustCreate(one_, 8 * kPage);
  MustCreate(other_, 4 * kPage);
  EXPECT_TRUE(registry_->EndClient(one_));
  registry_.reset();
  EXPECT_EQ(memory_.kept(), 12 * kPage);
  EXPECT_EQ(memory_.mapped(), 0u);
}

}  // namespace
}  // namespace attend
