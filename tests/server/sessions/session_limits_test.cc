// SPDX-License-Identifier: Apache-2.0
//
// How much memory sessions may take, from which tenant, and how refusals report it to programs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/util/rejection.h"
#include "tests/server/support/two_tenants_fixture.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using test::kPageBytes;
using test::kPages;
using test::kRows;
using test::kShape;

class SessionLimitsTest : public test::TwoTenantsTest {
 protected:
  // Limits tenant 0 to this many pages.
  void LimitPages(int64_t pages) {
    std::vector<TenantBounds> bounds(2);
    bounds[0][Limit::kSessionMemory] = pages * kPageBytes;
    limits_.Set(bounds);
  }
};

TEST_F(SessionLimitsTest, WithinItsLimitATenantEvictsItsOwnIdleSessions) {
  LimitPages(4);
  const std::string other = Make(1, 6 * kRows);
  const std::string oldest = Make(0, 2 * kRows), older = Make(0, 2 * kRows);
  const std::string newest = Make(0, 3 * kRows);  // there is memory, but not within the limit
  EXPECT_EQ(table_->tenant_bytes(0)[0], 4 * kPageBytes);
  EXPECT_EQ(table_->Get(0, oldest)->length, 0);
  EXPECT_EQ(table_->Get(0, older)->length, kRows);
  EXPECT_EQ(table_->Get(1, other)->length, 6 * kRows);
  EXPECT_EQ(table_->stats().evictions_own, 2);
  EXPECT_EQ(limits_.use(0, Limit::kSessionMemory).refused, 0);
}

TEST_F(SessionLimitsTest, BeyondItsLimitATenantIsRefusedWithoutEvictions) {
  LimitPages(4);
  const std::string pinned = Make(0, 3 * kRows, true), idle = Make(0, kRows);
  CacheRefusal refusal;
  const std::string needy = Make(0);
  const Status status = Append(0, needy, 0, 2 * kRows, &refusal);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("tenant limit session-memory: the tenant's sessions "
                                          "would have 24576 bytes on a device, may have at most "
                                          "16384"));
  EXPECT_EQ(refusal.missing_bytes, 2 * kPageBytes);
  EXPECT_EQ(RejectionOf(status), Rejection::kTenantLimit);
  EXPECT_EQ(table_->Get(0, idle)->length, kRows);
  EXPECT_EQ(limits_.use(0, Limit::kSessionMemory).refused, 1);
  EXPECT_TRUE(Append(1, Make(1), 0, 8 * kRows).ok());
  LimitPages(5);
  EXPECT_TRUE(Append(0, needy, 0, 2 * kRows).ok());  // evicts the idle one
  EXPECT_EQ(table_->Get(0, idle)->length, 0);
}

TEST_F(SessionLimitsTest, ALoweredLimitEvictsNothingAndAllowsNoGrowth) {
  const std::string session = Make(0, 4 * kRows);
  LimitPages(2);
  EXPECT_EQ(table_->Get(0, session)->length, 4 * kRows);
  EXPECT_EQ(Append(0, session, 4 * kRows, 1).code(), Code::kResourceExhausted);
  EXPECT_TRUE(table_->Truncate(0, session, kRows).ok());
  EXPECT_TRUE(Append(0, session, kRows, kRows).ok());
}

TEST_F(SessionLimitsTest, EvictingSharedPagesShortensEverySession) {
  LimitPages(4);
  const std::string first = Make(0, 3 * kRows);
  const Result<SessionInfo> fork = table_->Fork(0, first, {});
  ASSERT_TRUE(fork.ok());
  EXPECT_TRUE(Append(0, Make(0), 0, 3 * kRows).ok());
  EXPECT_EQ(table_->Get(0, first)->length, kRows);
  EXPECT_EQ(table_->Get(0, fork->id)->length, kRows);
}

TEST_F(SessionLimitsTest, AWrongLengthIsReportedWithTheActualOnes) {
  const std::string one = Make(0, 5), two = Make(0, 7), other = Make(1, 9);
  CacheRefusal refusal;
  const CacheUse uses[] = {{one, 0, 5, ""}, {two, 0, 6, ""}, {other, 0, 9, ""}, {one, 3, 0, ""}};
  EXPECT_EQ(table_->Hold(0, uses, 1, &refusal).status().code(), Code::kFailedPrecondition);
  // nothing about another tenant's session
  EXPECT_THAT(refusal.lengths, ElementsAre(5, 7, -1, -1));
  EXPECT_EQ(refusal.missing_bytes, 0);
}

TEST_F(SessionLimitsTest, AnEvictionIsReportedWithTheRemainingLength) {
  const std::string idle = Make(0, 10 * kRows);
  Make(0, 10 * kRows);
  CacheRefusal refusal;
  EXPECT_EQ(Append(0, idle, 10 * kRows, 1, &refusal).code(), Code::kOutOfRange);
  EXPECT_THAT(refusal.lengths, ElementsAre(2 * kRows));
}

TEST_F(SessionLimitsTest, MissingMemoryIsReported) {
  Make(0, 8 * kRows, true);
  Make(1, 6 * kRows, true);
  CacheRefusal refusal;
  const std::string needy = Make(0);
  EXPECT_EQ(Append(0, needy, 0, 5 * kRows, &refusal).code(), Code::kResourceExhausted);
  EXPECT_EQ(refusal.missing_bytes, 3 * kPageBytes);
  EXPECT_TRUE(refusal.lengths.empty());
}

// The report covers all layers, also those that were not reached.
TEST_F(SessionLimitsTest, MemoryMissingForAForkOrTruncationIsReported) {
  const Result<SessionInfo> made =
      table_->Create(0, {0, {kShape, kShape, kShape}, std::chrono::seconds(60)});
  ASSERT_TRUE(made.ok());
  for (const int64_t layer : {0, 1, 2}) {
    ASSERT_TRUE(Append(0, made->id, 0, kRows, nullptr, layer).ok());
  }
  ASSERT_TRUE(table_->Fork(0, made->id, {}).ok());  // shares the pages
  Make(0, 4 * kRows, true);
  Make(1, 8 * kRows, true);  // one page is left
  CacheRefusal fork, truncation;
  EXPECT_EQ(table_->Fork(0, made->id, 5, &fork).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(fork.missing_bytes, 2 * kPageBytes);
  EXPECT_EQ(table_->Truncate(0, made->id, 5, &truncation).status().code(),
            Code::kResourceExhausted);
  EXPECT_EQ(truncation.missing_bytes, 2 * kPageBytes);
}

TEST_F(SessionLimitsTest, AForkWithPagesOfTwoSizesEvictsNothingIfBothDoNotFit) {
  LayerShape wide = kShape;
  wide.heads_kv *= 16;  // two of the smallest pages
  const auto make = [&](std::vector<LayerShape> shapes, bool pinned) {
    const Result<SessionInfo> made =
        table_->Create(0, {0, shapes, std::chrono::seconds(60), pinned});
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    for (size_t n = 0; n < shapes.size(); ++n) {
      EXPECT_TRUE(Append(0, made->id, 0, kRows, nullptr, static_cast<int64_t>(n)).ok());
    }
    return made->id;
  };
  const std::string idle = Make(0, kRows), origin = make({kShape, wide}, false);
  make({wide}, true);
  Make(0, 6 * kRows, true);
  Make(1, 4 * kRows, true);
  ASSERT_EQ(table_->memory(0).used_bytes, kPages * kPageBytes);
  CacheRefusal refusal;
  EXPECT_EQ(table_->Fork(0, origin, 5, &refusal).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(refusal.missing_bytes, 3 * kPageBytes);
  EXPECT_EQ(table_->Get(0, idle)->length, kRows);
}

// They are never idle, but take nothing from other tenants.
TEST_F(SessionLimitsTest, PinnedSessionsMayGrowLikeOthers) {
  const std::string pinned = Make(0, 12 * kRows, true);
  EXPECT_EQ(Append(0, Make(0), 0, 1).code(), Code::kResourceExhausted);
  EXPECT_TRUE(Append(1, Make(1), 0, 4 * kRows).ok());
  EXPECT_EQ(table_->Get(0, pinned)->length, 12 * kRows);
}

TEST_F(SessionLimitsTest, SessionsOnALostDeviceCanBeListedAndFreed) {
  const std::string id = Make(0, 3);
  table_->LoseDevice(0);
  EXPECT_EQ(table_->Get(0, id).status().code(), Code::kUnavailable);
  EXPECT_EQ(table_->Truncate(0, id, 0).status().code(), Code::kUnavailable);
  const std::vector<SessionInfo> list = table_->List(0, "", 8).sessions;
  ASSERT_EQ(list.size(), 1u);
  EXPECT_TRUE(list[0].lost);
  EXPECT_EQ(table_->Free(1, id).code(), Code::kNotFound);
  EXPECT_TRUE(table_->Free(0, id).ok());
  EXPECT_EQ(table_->Free(0, id).code(), Code::kNotFound);
  EXPECT_EQ(table_->memory(0).used_bytes, 0);
}

}  // namespace
}  // namespace attend
