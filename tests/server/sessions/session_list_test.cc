// SPDX-License-Identifier: Apache-2.0
//
// Lists of sessions: their bounds, and continuation.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/server/support/two_tenants_fixture.h"

namespace attend::test {
namespace {

class SessionListTest : public TwoTenantsTest {};

// A page of the list is bounded by layers too, whatever the number of sessions.
TEST_F(SessionListTest, APageOfTheListIsBoundedByLayers) {
  for (int n = 0; n < 8; ++n) {
    const std::vector<LayerShape> layers(512, kShape);
    ASSERT_TRUE(table_->Create(n % 2, {0, layers, std::chrono::seconds(60)}).ok());
  }
  std::vector<std::string> seen;
  SessionTable::Listed list;
  do {
    list = table_->List(0, seen.empty() ? "" : seen.back(), 256);
    ASSERT_EQ(list.sessions.size(), 2U);
    EXPECT_EQ(list.layers, SessionTable::kListedLayersMax);
    for (const SessionInfo& info : list.sessions) {
      EXPECT_EQ(info.tenant, 0);
      seen.push_back(info.id);
    }
  } while (list.more);
  EXPECT_EQ(seen.size(), 4U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(table_->List(1, "", 1).sessions.size(), 1U);
  EXPECT_EQ(table_->ListAll("2", 256).sessions.size(), 2U);
  EXPECT_EQ(table_->ListAll("2", 256).sessions.front().id, "3");
}

TEST_F(SessionListTest, APageHasAtLeastOneSession) {
  SessionOptions options = TwoTenants();
  options.layers_max = 2 * SessionTable::kListedLayersMax;
  Start(options);
  const std::vector<LayerShape> layers(options.layers_max, kShape);
  Make(0, 1);
  ASSERT_TRUE(table_->Create(0, {0, layers, std::chrono::seconds(60)}).ok());
  ASSERT_TRUE(table_->Create(0, {0, layers, std::chrono::seconds(60)}).ok());
  std::string after;
  for (const bool more : {true, true, false}) {
    const SessionTable::Listed list = table_->List(0, after, 256);
    ASSERT_EQ(list.sessions.size(), 1U);
    EXPECT_EQ(list.more, more);
    after = list.sessions.front().id;
  }
}

TEST_F(SessionListTest, PagesContinueWhereTheLastOneEnded) {
  for (int n = 0; n < 5; ++n) Make(n % 2, 1);
  const auto first = table_->List(0, "", 2);
  ASSERT_EQ(first.sessions.size(), 2u);
  EXPECT_TRUE(first.more);
  const auto rest = table_->List(0, first.sessions[1].id, 2);
  ASSERT_EQ(rest.sessions.size(), 1u);
  EXPECT_FALSE(rest.more);
  EXPECT_TRUE(table_->List(0, rest.sessions[0].id, 2).sessions.empty());
}

// Expired leases and other tenants' sessions are not listed, and do not end a page.
TEST_F(SessionListTest, ListsOnlyTheTenantsLiveSessions) {
  Make(0);
  clock_.Advance(std::chrono::seconds(59));
  const std::string other = Make(1), kept = Make(0), freed = Make(0);
  clock_.Advance(std::chrono::seconds(2));
  ASSERT_TRUE(table_->Free(0, freed).ok());
  const SessionTable::Listed own = table_->List(0, "", 256);
  ASSERT_EQ(own.sessions.size(), 1U);
  EXPECT_EQ(own.sessions.front().id, kept);
  EXPECT_FALSE(own.more);
  const SessionTable::Listed all = table_->ListAll("", 1);
  EXPECT_EQ(all.sessions.front().id, std::min(other, kept));
  EXPECT_TRUE(all.more);
}

// A session's bytes are a running sum, updated as pages come and go.
TEST_F(SessionListTest, ListsTheBytesOfEachSession) {
  const std::string id = Make(0, 3 * kRows);
  const Result<SessionInfo> fork = table_->Fork(0, id, kRows + 1);
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(Append(0, fork->id, kRows + 1, 2 * kRows).ok());
  ASSERT_TRUE(table_->Truncate(0, id, kRows).ok());
  const SessionTable::Listed list = table_->List(0, "", 256);
  ASSERT_EQ(list.sessions.size(), 2U);
  EXPECT_EQ(list.sessions[0].bytes, kPageBytes);
  EXPECT_EQ(list.sessions[1].bytes, 4 * kPageBytes);
}

}  // namespace
}  // namespace attend::test
