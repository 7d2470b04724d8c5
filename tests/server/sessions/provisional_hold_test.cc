// SPDX-License-Identifier: Apache-2.0
//
// Requests whose bytes still arrive: what they keep of sessions, and for whom they give way.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/server/support/two_tenants_fixture.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using test::kPageBytes;
using test::kRows;

// Of 16 pages, each tenant's share is 8.
class ProvisionalHoldTest : public test::TwoTenantsTest {
 protected:
  // The hold of a request whose bytes still arrive.
  std::unique_ptr<CacheHold> Upload(int tenant, const std::string& id, int64_t length,
                                    int64_t rows) {
    const CacheUse use{id, 0, length, ""};
    tables_.push_back(std::vector<PageNumber>(32));
    auto hold = table_->Hold(tenant, {&use, 1}, rows);
    EXPECT_TRUE(hold.ok()) << hold.status().ToString();
    const Status status =
        (*hold)->Reserve(tables_.back().data(), 32, nullptr, CacheHold::Firmness::kProvisional);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(table_->Consistent());
    return *std::move(hold);
  }
  int64_t Length(int tenant, const std::string& id) { return table_->Get(tenant, id)->length; }

  std::vector<std::vector<PageNumber>> tables_;  // outlive the holds
};

TEST_F(ProvisionalHoldTest, WhatIsReadBeyondAShareIsEvictedForATenantWithinItsOwn) {
  const std::string greedy = Make(0, 12 * kRows), needy = Make(1);
  const auto upload = Upload(0, greedy, 12 * kRows, 0);
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
  EXPECT_EQ(Length(0, greedy), 8 * kRows) << "its share it keeps";
  CacheRefusal refusal;
  const Status status = upload->Confirm(&refusal);
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_THAT(status.message(), HasSubstr("the layer has 128 tokens: the others were evicted"));
  EXPECT_THAT(refusal.lengths, ElementsAre(8 * kRows));
}

TEST_F(ProvisionalHoldTest, PagesThatAnUploadHasTakenGoToATenantWithinItsShare) {
  const std::string greedy = Make(0), needy = Make(1);
  const auto upload = Upload(0, greedy, 0, 16 * kRows);
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
  CacheRefusal refusal;
  EXPECT_EQ(upload->Confirm(&refusal).code(), Code::kResourceExhausted);
  EXPECT_EQ(refusal.missing_bytes, 8 * kPageBytes);
  EXPECT_TRUE(Append(0, greedy, 0, 8 * kRows).ok()) << "nothing of it is left";
  EXPECT_EQ(Length(0, greedy), 8 * kRows);
}

// Only what is lacking is taken.
TEST_F(ProvisionalHoldTest, WhoGaveWayGoesOnIfAllThatItNeedsIsThere) {
  const std::string read = Make(0, 8 * kRows), written = Make(0, 3 * kRows);
  const auto reader = Upload(0, read, 8 * kRows, 0);
  const auto writer = Upload(0, written, 3 * kRows, 2 * kRows);
  const std::string needy = Make(1, 4 * kRows);
  EXPECT_TRUE(reader->Confirm().ok());
  CacheRefusal refusal;
  EXPECT_EQ(writer->Confirm(&refusal).code(), Code::kResourceExhausted);
  EXPECT_EQ(refusal.missing_bytes, kPageBytes);
  EXPECT_EQ(Length(0, written), 3 * kRows);
  EXPECT_TRUE(table_->Free(1, needy).ok());
  const auto again = Upload(0, written, 3 * kRows, 2 * kRows);
  EXPECT_TRUE(table_->Free(1, Make(1, 4 * kRows)).ok());
  ASSERT_TRUE(again->Confirm().ok());
  again->Commit();
  EXPECT_EQ(Length(0, written), 5 * kRows);
}

// Idle sessions seem to be enough, as each of those that share pages counts with all of them.
TEST_F(ProvisionalHoldTest, WhatIsReadGoesWhereSharedPagesWereTooFew) {
  const std::string shared = Make(0, 2 * kRows), greedy = Make(0, 14 * kRows), needy = Make(1);
  for (int n = 0; n < 3; ++n) ASSERT_TRUE(table_->Fork(0, shared, std::nullopt).ok());
  const auto upload = Upload(0, greedy, 14 * kRows, 0);
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
  EXPECT_EQ(Length(0, shared), 0);
  EXPECT_EQ(Length(0, greedy), 8 * kRows);
}

TEST_F(ProvisionalHoldTest, NobodyElseMakesItGiveWay) {
  const std::string greedy = Make(0, 10 * kRows), own = Make(0), needy = Make(1, 4 * kRows, true);
  const auto upload = Upload(0, greedy, 10 * kRows, kRows);
  EXPECT_EQ(Append(0, own, 0, 4 * kRows).code(), Code::kResourceExhausted) << "its own tenant";
  EXPECT_EQ(Append(1, needy, 4 * kRows, 5 * kRows).code(), Code::kResourceExhausted)
      << "beyond its share";
  ASSERT_TRUE(upload->Confirm().ok());
  upload->Commit();
  EXPECT_EQ(Length(0, greedy), 11 * kRows);
}

TEST_F(ProvisionalHoldTest, WithinItsShareItStays) {
  const std::string modest = Make(0, 7 * kRows), needy = Make(1);
  const auto upload = Upload(0, modest, 7 * kRows, kRows);
  EXPECT_EQ(Append(1, needy, 0, 9 * kRows).code(), Code::kResourceExhausted);
  EXPECT_TRUE(Append(1, needy, 0, 8 * kRows).ok());
  ASSERT_TRUE(upload->Confirm().ok());
  upload->Commit();
  EXPECT_EQ(Length(0, modest), 8 * kRows);
}

// What was freed or cut off is kept only by those that read it.
TEST_F(ProvisionalHoldTest, WhatWasFreedOrCutOffMeanwhileIsGivenUpToo) {
  for (const bool free : {true, false}) {
    const std::string greedy = Make(0, 12 * kRows);
    const auto upload = Upload(0, greedy, 12 * kRows, 0);
    if (free) {
      ASSERT_TRUE(table_->Free(0, greedy).ok());
    } else {
      ASSERT_TRUE(table_->Truncate(0, greedy, kRows).ok());
    }
    EXPECT_EQ(table_->memory(0).used_bytes, 12 * kPageBytes);
    const std::string needy = Make(1, 8 * kRows);
    EXPECT_EQ(table_->memory(0).used_bytes, (free ? 8 : 9) * kPageBytes);
    EXPECT_EQ(upload->Confirm().code(), free ? Code::kNotFound : Code::kFailedPrecondition);
    ASSERT_TRUE(table_->Free(1, needy).ok());
  }
}

TEST_F(ProvisionalHoldTest, AnAppendThatSomebodyElseMadeMeanwhileIsNotMadeTwice) {
  const std::string greedy = Make(0, 10 * kRows), needy = Make(1);
  const auto upload = Upload(0, greedy, 10 * kRows, 2 * kRows);
  EXPECT_TRUE(Append(1, needy, 0, 5 * kRows).ok());
  EXPECT_TRUE(table_->Free(1, needy).ok());
  EXPECT_TRUE(Append(0, greedy, 10 * kRows, 1).ok());
  EXPECT_EQ(upload->Confirm().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Length(0, greedy), 10 * kRows + 1);
}

}  // namespace
}  // namespace attend
