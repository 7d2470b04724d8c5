// SPDX-License-Identifier: Apache-2.0
//
// What a tenant might do to keep more of the memory than its share from another that asks for its
// own, and what should not be taken from it.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/kernels/support/problems.h"
#include "tests/server/support/eviction_fixture.h"

namespace attend {
namespace {

using test::EvictionTest;
using test::kPageBytes;
using test::kRows;
using test::kShape;

class EvictionAttacksTest : public EvictionTest {
 protected:
  int64_t Pages(int tenant) { return table_->tenant_bytes(0)[tenant] / kPageBytes; }
  // Of 16 pages, the first tenant's share is 8, those of two others are 4 each.
  void StartThree() {
    SessionOptions options{.tenant_weights = {2, 1, 1}};
    options.page_rows = kRows;
    options.slab_bytes = 4 * kPageBytes;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&arena_, {}}});
  }
  // One page of each of so many layers.
  std::string MakeLayers(int tenant, int64_t layers) {
    const SessionSpec spec{0, std::vector<LayerShape>(layers, kShape), std::chrono::seconds(60)};
    const std::string id = table_->Create(tenant, spec)->id;
    for (int64_t n = 0; n < layers; ++n) {
      EXPECT_TRUE(Append(tenant, id, 0, 1, nullptr, n).ok());
    }
    return id;
  }
  // Asks for 8 pages, while the other tenant goes on as it likes.
  template <class Meanwhile>
  void ExpectItsShare(const std::string& needy, Meanwhile meanwhile) {
    Status status;
    for (int n = 0; n < 5; ++n) {
      meanwhile();
      status = Append(1, needy, 0, 8 * kRows);
      if (status.ok()) break;
    }
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(Pages(0), 8);
  }
};

// The one before ends when the next has begun.
TEST_F(EvictionAttacksTest, ForksThatAreReadAndFreedKeepNothing) {
  const std::string trunk = Make(0, 16 * kRows), needy = Make(1);
  std::unique_ptr<CacheHold> reader;
  ExpectItsShare(needy, [&] {
    const int64_t length = Length(0, trunk);
    const std::string fork = Fork(0, trunk, length);
    auto next = Run(0, fork, length);
    EXPECT_TRUE(table_->Free(0, fork).ok());
    reader = std::move(next);
  });
}

TEST_F(EvictionAttacksTest, ForksThatAreReadAndCutKeepNothing) {
  const std::string trunk = Make(0, 16 * kRows), needy = Make(1);
  std::unique_ptr<CacheHold> reader;
  std::string last;
  ExpectItsShare(needy, [&] {
    const int64_t length = Length(0, trunk);
    const std::string fork = Fork(0, trunk, length);
    auto next = Run(0, fork, length);
    EXPECT_TRUE(table_->Truncate(0, fork, 0).ok());
    reader = std::move(next);
    EXPECT_TRUE(last.empty() || table_->Free(0, last).ok());
    last = fork;
  });
}

// The tokens of one page each are more than its share.
TEST_F(EvictionAttacksTest, ManyLayersOfFewTokensKeepNothing) {
  const std::string greedy = MakeLayers(0, 16), needy = Make(1);
  ExpectItsShare(needy, [] {});
  const std::vector<int64_t> lengths = table_->Get(0, greedy)->layer_lengths;
  for (size_t n = 0; n < 16; ++n) EXPECT_EQ(lengths[n], n < 8 ? 1 : 0);
}

TEST_F(EvictionAttacksTest, ManyLayersThatAreSharedKeepNothing) {
  const SessionSpec spec{0, std::vector<LayerShape>(16, kShape), std::chrono::seconds(60)};
  const std::string greedy = table_->Create(0, spec)->id, needy = Make(1);
  for (int64_t n = 0; n < 16; ++n) ASSERT_TRUE(Append(0, greedy, 0, kRows, nullptr, n).ok());
  const std::string twin = Fork(0, greedy, kRows);
  ExpectItsShare(needy, [] {});
  EXPECT_EQ(table_->Get(0, twin)->layer_lengths, table_->Get(0, greedy)->layer_lengths);
  // What they have next of a layer is each one's own.
  EXPECT_TRUE(table_->Free(1, needy).ok());
  for (const std::string& id : {greedy, twin}) {
    EXPECT_TRUE(Append(0, id, 0, kRows, nullptr, 15).ok());
  }
  EXPECT_TRUE(table_->Consistent());
  EXPECT_EQ(Pages(0), 10);
  EXPECT_TRUE(Append(1, Make(1), 0, 8 * kRows).ok());
  EXPECT_EQ(Pages(0), 8) << "of both, where they are not shared";
}

TEST_F(EvictionAttacksTest, AForkOfManyLayersGetsAllItsPages) {
  const std::string needy = MakeLayers(1, 4), greedy = Make(0, 12 * kRows);
  auto reader = Run(0, greedy, 12 * kRows);
  EXPECT_EQ(table_->Fork(1, needy, 1).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, greedy), 8 * kRows);
  reader = nullptr;
  EXPECT_FALSE(Append(0, greedy, 8 * kRows, kRows).ok()) << "all four are kept";
  EXPECT_TRUE(table_->Fork(1, needy, 1).ok());
}

// It keeps its share: what its append had taken comes back as well.
TEST_F(EvictionAttacksTest, AnAppendThatIsLostCounts) {
  const std::string greedy = Make(0, 3 * kRows), needy = Make(1);
  auto append = Run(0, greedy, 3 * kRows, 10 * kRows);
  EXPECT_EQ(Append(1, needy, 0, 8 * kRows).code(), Code::kResourceExhausted);
  append->Commit();
  append = nullptr;
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
  EXPECT_EQ(Pages(0), 8);
}

TEST_F(EvictionAttacksTest, WhatManyReadComesBackOnce) {
  Start(TwoTenants(), 10000);
  const std::string trunk = Make(0, 14 * kRows), needy = Make(1);
  std::vector<CacheUse> uses;
  const int forks = std::max(500, static_cast<int>(5000 * test::TestScale()));  // each is audited
  for (int n = 0; n < forks; ++n) uses.push_back({Fork(0, trunk, 14 * kRows), 0, 14 * kRows, ""});
  std::vector<PageNumber> pages(uses.size() * 16);
  std::vector<std::unique_ptr<CacheHold>> holds;
  for (size_t at = 0; at < uses.size(); at += 250) {
    holds.push_back(*table_->Hold(0, std::span(uses).subspan(at, 250), 0));
    ASSERT_TRUE(holds.back()->Reserve(&pages[at * 16], 16).ok());
  }
  for (int n = 0; n < 5; ++n) {
    EXPECT_FALSE(Append(1, needy, 0, 8 * kRows).ok());
    EXPECT_EQ(Length(0, trunk), 8 * kRows);
  }
  holds.clear();
  EXPECT_EQ(Pages(0), 8);
}

TEST_F(EvictionAttacksTest, AClaimLastsAsLongAsItsTenantAsks) {
  const std::string greedy = Make(0, 12 * kRows), needy = Make(1);
  auto reader = Run(0, greedy, 12 * kRows);
  for (int n = 0; n < 6; ++n) {
    EXPECT_FALSE(Append(1, needy, 0, 6 * kRows).ok());
    clock_.Advance(table_->options().claim_time / 2);
  }
  reader = nullptr;
  EXPECT_FALSE(Append(0, greedy, 10 * kRows, 6 * kRows).ok());
}

TEST_F(EvictionAttacksTest, WhatComesBackIsPromisedOnce) {
  StartThree();
  const std::string greedy = Make(0, 16 * kRows), one = Make(1), two = Make(2);
  auto reader = Run(0, greedy, 16 * kRows);
  EXPECT_FALSE(Append(1, one, 0, 4 * kRows).ok());
  EXPECT_FALSE(Append(2, two, 0, 4 * kRows).ok());
  EXPECT_EQ(Length(0, greedy), 8 * kRows);
  const auto next = Run(0, greedy, 8 * kRows);
  reader = nullptr;
  EXPECT_TRUE(Append(1, one, 0, 4 * kRows).ok());
  EXPECT_TRUE(Append(2, two, 0, 4 * kRows).ok());
}

TEST_F(EvictionAttacksTest, WhatIsPinnedGoesWithItsLease) {
  SessionOptions options = TwoTenants();
  options.pages_slice = 1;  // so that most are not freed at once
  Start(options);
  for (int n = 0; n < 4; ++n) Make(0, 2 * kRows, true);
  clock_.Advance(std::chrono::minutes(2));
  EXPECT_TRUE(Append(1, Make(1), 0, 15 * kRows).ok());
}

// With what is new it would be within its share, if not with what it has besides.
TEST_F(EvictionAttacksTest, WhoHasIdleSessionsGetsItsShareToo) {
  const std::string old = Make(1, 6 * kRows), greedy = Make(0, 10 * kRows), needy = Make(1);
  auto reader = Run(0, greedy, 10 * kRows);
  EXPECT_FALSE(Append(1, needy, 0, 7 * kRows).ok());
  EXPECT_EQ(Length(1, old), 0);
  EXPECT_EQ(Length(0, greedy), 9 * kRows);
  reader = Run(0, greedy, Length(0, greedy));
  EXPECT_TRUE(Append(1, needy, 0, 7 * kRows).ok());
}

// What one of three lacks, as the first goes beyond its share, is kept for it: not of the share of
// the other, whose sessions go as new ones come.
TEST_F(EvictionAttacksTest, ClaimsTakeNothingOfAnothersShare) {
  StartThree();
  const std::string old = Make(1, 2 * kRows), next = Make(1, 2 * kRows);
  const std::string greedy = Make(0, 12 * kRows), needy = Make(2);
  const auto reader = Run(0, greedy, 12 * kRows);
  EXPECT_FALSE(Append(2, needy, 0, 4 * kRows).ok());
  const Status status = Append(1, Make(1), 0, 2 * kRows);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(Length(1, old), 0);
  EXPECT_EQ(Length(1, next), 2 * kRows);
  EXPECT_EQ(Pages(1), 4);
}

// Where all of them would be enough.
TEST_F(EvictionAttacksTest, ClaimsCostNobodyMoreThanItNeeds) {
  StartThree();
  const std::string old = Make(1, 2 * kRows), next = Make(1, 2 * kRows);
  const std::string greedy = Make(0, 12 * kRows), needy = Make(2);
  auto reader = Run(0, greedy, 12 * kRows);
  EXPECT_FALSE(Append(2, needy, 0, 2 * kRows).ok());
  EXPECT_TRUE(Append(1, Make(1), 0, 2 * kRows).ok());
  EXPECT_EQ(Length(1, old), 0);
  EXPECT_EQ(Length(1, next), 2 * kRows) << "it has no more than its share";
}

// Who sends slowly, within its share, may keep what it reads as long as it likes.
TEST_F(EvictionAttacksTest, WhatComesBackOfAShareIsPromisedToNobody) {
  StartThree();
  const std::string slow = Make(1, 4 * kRows);
  const auto upload = Run(1, slow, 4 * kRows);
  EXPECT_TRUE(table_->Free(1, slow).ok());
  const std::string greedy = Make(0, 12 * kRows), needy = Make(2);
  auto reader = Run(0, greedy, 12 * kRows);
  EXPECT_FALSE(Append(2, needy, 0, 4 * kRows).ok());
  EXPECT_EQ(Length(0, greedy), 8 * kRows);
  const auto next = Run(0, greedy, Length(0, greedy));
  reader = nullptr;
  EXPECT_TRUE(Append(2, needy, 0, 4 * kRows).ok());
}

// The neighbours of one that goes on after a page are before it, too.
TEST_F(EvictionAttacksTest, WhatGoesOnLastTakesWhatItSharesWithIt) {
  const std::string a = Make(0, 2 * kRows), a2 = Fork(0, a, 2 * kRows);
  const std::string b = Fork(0, a, 2 * kRows, 2 * kRows), b2 = Fork(0, b, 4 * kRows);
  EXPECT_TRUE(Append(0, Make(0), 0, 16 * kRows).ok());
}

}  // namespace
}  // namespace attend
