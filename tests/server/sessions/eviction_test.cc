// SPDX-License-Identifier: Apache-2.0
//
// How running requests and their tenants affect evictions. For evictions of pages shared by several
// sessions see page_tree_test.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/server/support/eviction_fixture.h"

namespace attend {
namespace {

using test::EvictionTest;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using test::kPageBytes;
using test::kRows;
using test::kShape;

TEST_F(EvictionTest, AnEvictionIsReportedAtTheNextUse) {
  const std::string trunk = Make(0, 6 * kRows), fork = Fork(0, trunk, 4 * kRows, 2 * kRows);
  Make(0, 8 * kRows);
  EXPECT_EQ(Length(0, trunk), 4 * kRows) << "its own, then the fork's";
  EXPECT_EQ(Length(0, fork), 4 * kRows);
  CacheRefusal refusal;
  EXPECT_EQ(Append(0, fork, 6 * kRows, 1, &refusal).code(), Code::kOutOfRange);
  EXPECT_THAT(refusal.lengths, ElementsAre(4 * kRows));
  EXPECT_TRUE(Append(0, fork, 4 * kRows, 0).ok());
}

TEST_F(EvictionTest, SharedPagesAreEvictedFromAllLayersAlike) {
  clock_.Advance(std::chrono::milliseconds(1));
  const auto made = table_->Create(0, {0, {kShape, kShape, kShape}, std::chrono::seconds(60)});
  ASSERT_TRUE(made.ok());
  for (int64_t layer = 0; layer < 3; ++layer) {
    ASSERT_TRUE(Append(0, made->id, 0, (layer == 1 ? 4 : 3) * kRows, nullptr, layer).ok());
  }
  const std::string fork = Fork(0, made->id, 3 * kRows);
  ASSERT_TRUE(Append(0, fork, 3 * kRows, kRows, nullptr, 2).ok());
  ASSERT_EQ(UsedPages(), 11);
  Make(0, 4 * kRows);
  EXPECT_THAT(table_->Get(0, made->id)->layer_lengths, ElementsAre(32, 32, 32));
  EXPECT_THAT(table_->Get(0, fork)->layer_lengths, ElementsAre(32, 32, 32));
  EXPECT_EQ(UsedPages(), 10);
}

// A tenant that always has a request running, or a client that sends its bytes slowly, cannot keep
// another tenant from its own part.
TEST_F(EvictionTest, RunningSessionsAreNotEvictedAndATenantsPartIsFree) {
  const std::string greedy = Make(0, 10 * kRows), needy = Make(1);
  auto append = Run(0, greedy, 10 * kRows, 2 * kRows);
  EXPECT_TRUE(Append(1, needy, 0, 4 * kRows).ok());
  CacheRefusal refusal;
  const Status status = Append(1, needy, 4 * kRows, 3 * kRows, &refusal);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(),
              HasSubstr("sessions need 3 more pages of 4096 bytes, 12288 bytes more than there is "
                        "room for; the tenant has 16384 bytes, may have at most 49152 "
                        "(session-memory), of which 16384 are reserved for it"));
  EXPECT_EQ(refusal.missing_bytes, 3 * kPageBytes);
  append->Commit();
  append = nullptr;
  EXPECT_EQ(Length(0, greedy), 12 * kRows);
  EXPECT_TRUE(Append(1, needy, 4 * kRows, 3 * kRows).ok()) << "now it is idle";
  EXPECT_EQ(Length(0, greedy), 9 * kRows);
}

TEST_F(EvictionTest, ARunningSessionIsNotEvictedByItsOwnTenantEither) {
  const std::string read = Make(0, 10 * kRows), idle = Make(0, 2 * kRows), needy = Make(0);
  const auto reader = Run(0, read, 10 * kRows);
  EXPECT_EQ(Append(0, needy, 0, 3 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, idle), 2 * kRows) << "what is refused evicts nothing";
  EXPECT_TRUE(Append(0, needy, 0, 2 * kRows).ok());
  EXPECT_EQ(Length(0, read), 10 * kRows);
  EXPECT_EQ(Length(0, idle), 0);
}

TEST_F(EvictionTest, PagesSharedByPinnedForksAreNotEvictable) {
  const std::string pinned = Make(0, 8 * kRows, true), fork = Fork(0, pinned, 8 * kRows);
  const std::string idle = Make(0, 2 * kRows), needy = Make(0);
  EXPECT_EQ(Append(0, needy, 0, 5 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, idle), 2 * kRows) << "what is refused evicts nothing";
  EXPECT_TRUE(Append(0, needy, 0, 4 * kRows).ok());
  EXPECT_EQ(Length(0, idle), 0);
  EXPECT_EQ(Length(0, fork), 8 * kRows);
}

TEST_F(EvictionTest, PinnedPagesAreFreedWhenTheLeaseEnds) {
  const std::string pinned = Make(0, 12 * kRows, true), needy = Make(1, 4 * kRows);
  EXPECT_EQ(Append(1, needy, 4 * kRows, kRows).code(), Code::kResourceExhausted);
  for (int n = 0; n < 2; ++n) {
    clock_.Advance(std::chrono::seconds(40));
    EXPECT_TRUE(Exists(1, needy));
  }
  EXPECT_TRUE(Append(1, needy, 4 * kRows, 8 * kRows).ok());
  EXPECT_FALSE(Exists(0, pinned));
}

TEST_F(EvictionTest, ASessionBeingTruncatedIsNotEvicted) {
  const std::string greedy = Make(0, 10 * kRows), needy = Make(1, 4 * kRows);
  auto reader = Run(0, greedy, 10 * kRows);  // so that the page of the cut is copied
  bool copied = false;
  arena_.on_copy = [&] {
    copied = true;
    reader = nullptr;
    EXPECT_EQ(Append(1, needy, 4 * kRows, 8 * kRows).code(), Code::kResourceExhausted);
  };
  const Result<SessionInfo> cut = table_->Truncate(0, greedy, 10 * kRows - 1);
  EXPECT_TRUE(copied);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut->length, 10 * kRows - 1);
}

TEST_F(EvictionTest, EndingManySessionsDoesNotBlockOtherCalls) {
  SessionOptions options{.tenant_weights = {1}};
  options.pages_slice = 4;
  Start(options);
  for (const bool lease : {true, false}) {
    std::vector<std::string> ids;
    for (int n = 0; n < 5; ++n) ids.push_back(Make(0, 3 * kRows));
    if (!lease) {
      EXPECT_EQ(table_->EvictTenant(0, false).sessions, 5);
      EXPECT_EQ(UsedPages(), 0);
      EXPECT_EQ(table_->FreeTenant(0), 5);
      continue;
    }
    clock_.Advance(std::chrono::minutes(5));
    EXPECT_FALSE(Exists(0, ids[4])) << "its lease is over, though it has not been freed";
    EXPECT_EQ(UsedPages(), 12);
    EXPECT_TRUE(table_->List(0, "", 100).sessions.empty());
    EXPECT_EQ(table_->Free(0, ids[4]).code(), Code::kNotFound);
    table_->Expire();
    EXPECT_EQ(UsedPages(), 0);
    EXPECT_EQ(table_->stats().expired, 5);
  }
  EXPECT_EQ(table_->stats().sessions, 0);
}

}  // namespace
}  // namespace attend
