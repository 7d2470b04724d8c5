// SPDX-License-Identifier: Apache-2.0
//
// Pages that several sessions share, and those of sessions that requests use.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
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

// A tree: 2 pages of all, from which two branches go, of 3 and 4 pages, each of two sessions.
TEST_F(EvictionTest, OfABranchOnlyThoseWhoShareItLoseIt) {
  const std::string a = Make(0, 5 * kRows), a2 = Fork(0, a, 5 * kRows);
  const std::string b = Fork(0, a, 2 * kRows, 4 * kRows), b2 = Fork(0, b, 6 * kRows);
  ASSERT_EQ(UsedPages(), 9);
  const std::string needy = Make(0, 8 * kRows);
  EXPECT_EQ(Length(0, a), 4 * kRows) << "used longest ago";
  EXPECT_EQ(Length(0, a2), 4 * kRows);
  EXPECT_EQ(Length(0, b), 6 * kRows);
  EXPECT_TRUE(Append(0, needy, 8 * kRows, 4 * kRows).ok());
  EXPECT_EQ(Length(0, a), 2 * kRows) << "what the other branch goes on from is its, too";
  EXPECT_EQ(Length(0, a2), 2 * kRows);
  EXPECT_EQ(Length(0, b), 4 * kRows);
  EXPECT_EQ(Length(0, b2), 4 * kRows);
  EXPECT_TRUE(Append(0, needy, 12 * kRows, 2 * kRows).ok());
  for (const std::string& id : {a, a2, b, b2}) EXPECT_EQ(Length(0, id), 2 * kRows);
  EXPECT_TRUE(Append(0, needy, 14 * kRows, 2 * kRows).ok());
  EXPECT_EQ(UsedPages(), 16);
  for (const std::string& id : {a, a2, b, b2}) EXPECT_EQ(Length(0, id), 0);
}

// Nobody loses tokens for pages that one who keeps them shares.
TEST_F(EvictionTest, WhatARunningOneSharesIsLeftToAll) {
  const std::string running = Make(0, 4 * kRows), like = Fork(0, running, 4 * kRows);
  const std::string deeper = Fork(0, running, 4 * kRows, 2 * kRows);
  const std::string twin = Fork(0, deeper, 6 * kRows);
  const auto hold = Run(0, running, 4 * kRows);
  ASSERT_EQ(UsedPages(), 6);
  const std::string needy = Make(0);
  EXPECT_EQ(Append(0, needy, 0, 13 * kRows).code(), Code::kResourceExhausted);
  EXPECT_TRUE(Append(0, needy, 0, 12 * kRows).ok());
  for (const std::string& id : {running, like, deeper, twin}) EXPECT_EQ(Length(0, id), 4 * kRows);
}

TEST_F(EvictionTest, OfManyLayersWhatIsSharedGoesFromAllAlike) {
  clock_.Advance(std::chrono::milliseconds(1));
  const auto made = table_->Create(0, {0, {kShape, kShape, kShape}, std::chrono::seconds(60)});
  ASSERT_TRUE(made.ok());
  for (int64_t layer = 0; layer < 3; ++layer) {
    ASSERT_TRUE(Append(0, made->id, 0, (layer == 1 ? 4 : 3) * kRows, nullptr, layer).ok());
  }
  const std::string fork = Fork(0, made->id, 3 * kRows);
  ASSERT_TRUE(Append(0, fork, 3 * kRows, kRows, nullptr, 2).ok());
  ASSERT_EQ(UsedPages(), 11);
  const std::string needy = Make(0, 9 * kRows);
  EXPECT_THAT(table_->Get(0, made->id)->layer_lengths, ElementsAre(32, 32, 32));
  EXPECT_THAT(table_->Get(0, fork)->layer_lengths, ElementsAre(32, 32, 32));
  EXPECT_EQ(UsedPages(), 15);
}

// Forks of several lengths, many pages at once: those that fewer share go with those that more do.
TEST_F(EvictionTest, ManyPagesGoFromAllThatShareThem) {
  Start(TwoTenants(), 16);
  const std::string trunk = Make(0, 14 * kRows);
  const std::string longer = Fork(0, trunk, 13 * kRows), same = Fork(0, trunk, 13 * kRows);
  const std::string middle = Fork(0, trunk, 10 * kRows), like = Fork(0, trunk, 9 * kRows);
  const std::string shorter = Fork(0, trunk, 6 * kRows);
  const std::string needy = Make(1, 8 * kRows);
  EXPECT_EQ(UsedPages(), 16);
  for (const std::string& id : {trunk, longer, same, middle, like}) {
    EXPECT_EQ(Length(0, id), 8 * kRows);
  }
  EXPECT_EQ(Length(0, shorter), 6 * kRows);
  EXPECT_EQ(table_->stats().evicted_bytes, 6 * kPageBytes);
}

TEST_F(EvictionTest, ManyPagesThatAreReadComeBackLater) {
  const std::string trunk = Make(0, 14 * kRows), fork = Fork(0, trunk, 10 * kRows);
  const std::string read = Fork(0, trunk, 12 * kRows), less = Fork(0, trunk, 9 * kRows);
  auto reader = Run(0, read, 12 * kRows), second = Run(0, less, 9 * kRows);
  const std::string needy = Make(1);
  EXPECT_THAT(Append(1, needy, 0, 8 * kRows).message(), HasSubstr("room is being made"));
  for (const std::string& id : {trunk, fork, read, less}) EXPECT_EQ(Length(0, id), 8 * kRows);
  EXPECT_EQ(UsedPages(), 12);
  reader.reset();
  EXPECT_EQ(UsedPages(), 9);
  second.reset();
  EXPECT_EQ(UsedPages(), 8);
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
}

// A branch that goes on beside it, and one whose layers are not alike.
TEST_F(EvictionTest, ManyPagesGoUntilOthersShareThem) {
  clock_.Advance(std::chrono::milliseconds(1));
  const auto made = table_->Create(0, {0, {kShape, kShape}, std::chrono::seconds(60)});
  ASSERT_TRUE(made.ok());
  for (const int64_t layer : {0, 1}) {
    ASSERT_TRUE(Append(0, made->id, 0, 5 * kRows, nullptr, layer).ok());
  }
  const std::string branch = Fork(0, made->id, kRows), odd = Fork(0, made->id, 2 * kRows);
  for (const int64_t layer : {0, 1}) {
    ASSERT_TRUE(Append(0, branch, kRows, kRows, nullptr, layer).ok());
  }
  ASSERT_TRUE(Append(0, odd, 2 * kRows, kRows, nullptr, 1).ok());
  ASSERT_EQ(UsedPages(), 13);
  const std::string needy = Make(0, 8 * kRows);
  EXPECT_EQ(UsedPages(), 15);
  EXPECT_THAT(table_->Get(0, made->id)->layer_lengths, ElementsAre(2 * kRows, 2 * kRows));
  EXPECT_THAT(table_->Get(0, branch)->layer_lengths, ElementsAre(2 * kRows, 2 * kRows));
}

// Those cannot be in the way of what others run.
TEST_F(EvictionTest, WhoWaitsForWhatOthersRunKeepsItsOwn) {
  const std::string own = Make(1, 4 * kRows), fork = Fork(1, own, 4 * kRows);
  auto read = Run(1, fork, 4 * kRows);
  ASSERT_TRUE(table_->Free(1, fork).ok());
  const std::string greedy = Make(0, 12 * kRows);
  const auto reader = Run(0, greedy, 12 * kRows);
  const std::string needy = Make(1);
  EXPECT_THAT(Append(1, needy, 0, kRows).message(), HasSubstr("room is being made"));
  EXPECT_EQ(Length(1, own), 4 * kRows);
  EXPECT_EQ(Length(0, greedy), 11 * kRows);
}

// Requests that follow each other so closely that one always runs keep no other from its share.
TEST_F(EvictionTest, WhatRunsBeyondAShareIsEvictedForATenantWithinItsOwn) {
  const std::string greedy = Make(0, 13 * kRows), needy = Make(1);
  auto reader = Run(0, greedy, 13 * kRows);
  CacheRefusal refusal;
  const Status status = Append(1, needy, 0, 8 * kRows, &refusal);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("room is being made: ask again"));
  EXPECT_EQ(refusal.missing_bytes, 5 * kPageBytes);
  EXPECT_EQ(Length(0, greedy), 8 * kRows) << "its share it keeps";
  EXPECT_EQ(UsedPages(), 13) << "what is read stays as long as it is read";
  const auto next = Run(0, greedy, 8 * kRows);
  // Asked again, it takes nothing more.
  EXPECT_EQ(Append(1, needy, 0, 8 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, greedy), 8 * kRows);
  reader = nullptr;
  EXPECT_EQ(UsedPages(), 8);
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
}

TEST_F(EvictionTest, TheRoomThatIsMadeIsKeptForWhoAskedForIt) {
  const std::string greedy = Make(0, 12 * kRows), needy = Make(1);
  auto reader = Run(0, greedy, 12 * kRows);
  EXPECT_EQ(Append(1, needy, 0, 6 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, greedy), 10 * kRows);
  reader = nullptr;
  CacheRefusal refusal;
  const Status status = Append(0, greedy, 10 * kRows, kRows, &refusal);
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << "beyond its share";
  EXPECT_THAT(status.message(), HasSubstr("4096 bytes more than are free of 65536 beside 24576 for "
                                          "tenants within their shares"));
  EXPECT_EQ(refusal.missing_bytes, kPageBytes);
  EXPECT_TRUE(Append(1, needy, 0, 5 * kRows).ok()) << "it may take less";
  EXPECT_EQ(Append(0, greedy, 10 * kRows, kRows).code(), Code::kResourceExhausted)
      << "a page more is kept";
  EXPECT_TRUE(Append(1, needy, 5 * kRows, kRows).ok());
  EXPECT_TRUE(table_->Free(1, needy).ok());
  EXPECT_TRUE(Append(0, greedy, 10 * kRows, kRows).ok()) << "it had what it asked for";
}

TEST_F(EvictionTest, RoomIsKeptForATime) {
  const std::string greedy = Make(0, 12 * kRows), needy = Make(1);
  auto reader = Run(0, greedy, 12 * kRows);
  EXPECT_EQ(Append(1, needy, 0, 6 * kRows).code(), Code::kResourceExhausted);
  reader = nullptr;
  clock_.Advance(table_->options().claim_time);
  EXPECT_TRUE(Append(0, greedy, 10 * kRows, 6 * kRows).ok());
}

// It is as if it were evicted after its commit.
TEST_F(EvictionTest, AnAppendThatRunsIsEvictedTheRequestIsNot) {
  const std::string greedy = Make(0, 11 * kRows + 1), needy = Make(1, 2 * kRows);
  auto append = Run(0, greedy, 11 * kRows + 1, kRows);  // takes a 13th page
  EXPECT_EQ(Append(1, needy, 2 * kRows, 5 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, greedy), 9 * kRows)
      << "the page that was taken for the append comes back, too";
  EXPECT_EQ(append->sequences()[0].length, 12 * kRows + 1);
  const CacheUse use{greedy, 0, 9 * kRows, ""};
  EXPECT_EQ(table_->Hold(0, {&use, 1}, 1).status().code(), Code::kUnavailable);
  append->Commit();
  EXPECT_EQ(Length(0, greedy), 9 * kRows);
  EXPECT_EQ(UsedPages(), 15);
  append = nullptr;
  EXPECT_EQ(UsedPages(), 11);
  EXPECT_TRUE(table_->Consistent());
  EXPECT_TRUE(Append(1, needy, 2 * kRows, 5 * kRows).ok());
  EXPECT_EQ(Append(0, greedy, 12 * kRows + 1, 1).code(), Code::kOutOfRange) << "evicted";
  EXPECT_TRUE(table_->Free(1, needy).ok());
  EXPECT_TRUE(Append(0, greedy, 9 * kRows, kRows).ok());
}

TEST_F(EvictionTest, WhatRunsLosesNothingToItsOwnTenantNorToOneBeyondItsShare) {
  const std::string greedy = Make(0, 10 * kRows), own = Make(0), other = Make(1, 6 * kRows);
  const auto reader = Run(0, greedy, 10 * kRows);
  EXPECT_EQ(Append(0, own, 0, kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Append(1, other, 6 * kRows, 3 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, greedy), 10 * kRows);
  EXPECT_EQ(Length(1, other), 6 * kRows);
}

TEST_F(EvictionTest, WhatRunningRequestsShareComesBackOnce) {
  const std::string greedy = Make(0, 12 * kRows), twin = Fork(0, greedy, 12 * kRows);
  const std::string needy = Make(1);
  auto reader = Run(0, greedy, 12 * kRows), other = Run(0, twin, 12 * kRows);
  for (int n = 0; n < 2; ++n) {
    EXPECT_EQ(Append(1, needy, 0, 7 * kRows).code(), Code::kResourceExhausted);
    EXPECT_EQ(Length(0, greedy), 9 * kRows);
    EXPECT_EQ(Length(0, twin), 9 * kRows);
  }
  reader = nullptr;
  EXPECT_EQ(Append(1, needy, 0, 7 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, greedy), 9 * kRows);
  other = nullptr;
  EXPECT_TRUE(Append(1, needy, 0, 7 * kRows).ok());
}

// What is read or written now may go later: until then others lose what can go at once.
TEST_F(EvictionTest, WhoIsWithinItsShareHasAClaimWhateverRuns) {
  const std::string greedy = Make(0, 2 * kRows), idle = Make(0, 3 * kRows), needy = Make(1);
  auto append = Run(0, greedy, 2 * kRows, 10 * kRows);  // its pages are nobody's yet
  EXPECT_EQ(Append(1, needy, 0, 7 * kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, idle), 0);
  EXPECT_EQ(Length(0, greedy), 2 * kRows) << "without its append it would have less than its share";
  append->Commit();
  append = nullptr;
  EXPECT_EQ(Append(0, idle, 0, 10 * kRows).code(), Code::kResourceExhausted) << "7 pages are kept";
  EXPECT_TRUE(Append(1, needy, 0, 7 * kRows).ok());
}

TEST_F(EvictionTest, WhatIsBeingTruncatedIsLeftAlone) {
  const std::string greedy = Make(0, 11 * kRows), needy = Make(1);
  const auto reader = Run(0, greedy, 11 * kRows);  // so that the page of the cut is copied
  bool copied = false;
  arena_.on_copy = [&] {
    copied = true;
    EXPECT_EQ(Append(1, needy, 0, 8 * kRows).code(), Code::kResourceExhausted);
  };
  const Result<SessionInfo> cut = table_->Truncate(0, greedy, 11 * kRows - 1);
  EXPECT_TRUE(copied);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut->length, 11 * kRows - 1);
}

TEST_F(EvictionTest, SessionsThatEndTogetherLetOthersHaveTheirTurn) {
  SessionOptions options = TwoTenants();
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
