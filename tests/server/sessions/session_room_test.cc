// SPDX-License-Identifier: Apache-2.0
//
// The number of sessions and the memory of their tables, where tenants share both.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "server/util/rejection.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/server/support/two_tenants_fixture.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

using test::kPageBytes;
using test::kRows;
using test::kShape;

class SessionRoomTest : public test::TwoTenantsTest {};

// Two of the 8 places are reserved for each tenant, and 4 are common.
TEST_F(SessionRoomTest, EachTenantHasReservedPlaces) {
  std::vector<CacheUse> uses;
  for (int n = 0; n < 6; ++n) uses.push_back({Make(0, 1, n == 0), 0, 1, ""});
  std::vector<PageNumber> pages(8);
  const auto hold = table_->Hold(0, uses, 1);  // running, for as long as it likes
  ASSERT_TRUE(hold.ok() && (*hold)->Reserve(pages.data(), 1).ok());
  const Status refused = Create(0).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("the limit on sessions is reached, 8 (max-sessions); "
                                           "the tenant has 6, its reserved share is 2"));
  const std::string origin = Make(1, 1);
  EXPECT_TRUE(table_->Fork(1, origin, {}).ok());
  EXPECT_EQ(Create(1).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(table_->Fork(1, origin, {}).status().code(), Code::kResourceExhausted);
  for (const CacheUse& use : uses) EXPECT_TRUE(Exists(0, use.session)) << "none ends for another";
  EXPECT_TRUE(table_->Free(0, uses[0].session).ok());
  EXPECT_TRUE(Create(1).ok()) << "of the common ones";
  EXPECT_EQ(Create(0).status().code(), Code::kResourceExhausted);
}

TEST_F(SessionRoomTest, TheTablesMemoryIsBounded) {
  SessionOptions options{.tenant_weights = {1}};
  options.table_bytes_max = 2 * FixedBytes(1) + 3 * kPageEntryBytes;
  Start(options);
  const std::string id = Make(0, 3 * kRows);
  EXPECT_EQ(table_->table_bytes(), FixedBytes(1) + 3 * kPageEntryBytes);
  EXPECT_TRUE(table_->Fork(0, id, {}).ok());
  for (const Status& status :
       {Create(0).status(), table_->Fork(0, id, 0).status(), Append(0, id, 3 * kRows, 1)}) {
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_THAT(status.message(), HasSubstr("(memory-budget)"));
  }
  for (const SessionInfo& info : table_->List(0, "", 8).sessions) {
    ASSERT_TRUE(table_->Truncate(0, info.id, kRows).ok());
    EXPECT_TRUE(table_->Free(0, info.id).ok());
  }
  EXPECT_EQ(table_->table_bytes(), 0);
}

// Page lists that are much longer than what remains of them.
class LongListTest : public test::TwoTenantsTest {
 protected:
  static constexpr int64_t kMany = 1000;  // pages
  LongListTest() {
    SessionOptions options{.tenant_weights = {1}};
    options.page_rows = kRows;
    options.slab_bytes = 4 * kPageBytes;
    options.limits = &limits_;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&many_, {}}});
  }
  std::unique_ptr<CacheHold> Reserve(const std::string& id, int64_t length, int64_t rows) {
    const CacheUse use{id, 0, length, ""};
    auto hold = table_->Hold(0, {&use, 1}, rows);
    EXPECT_TRUE(hold.ok() && (*hold)->Reserve(pages_.data(), kMany).ok());
    return *std::move(hold);
  }
  // Memory that the tables do not count; more than they need for the rest.
  static constexpr int64_t kSlackBytes = 4 * kMany * sizeof(PageNumber);

  test::TestArena many_{kMany * kPageBytes + kPageUnitBytes};
  std::vector<PageNumber> pages_ = std::vector<PageNumber>(kMany);
};

TEST_F(LongListTest, ACutShrinksThePageList) {
  const std::string origin = Make(0);
  Reserve(origin, 0, kMany * kRows)->Commit();
  const int64_t before = table_->table_bytes();
  const test::HeapWatch heap;
  for (const int64_t length : {int64_t{0}, kRows}) {
    for (int n = 0; n < 40; ++n) {
      const Result<SessionInfo> fork = table_->Fork(0, origin, {});
      ASSERT_TRUE(fork.ok() && table_->Truncate(0, fork->id, length).ok());
    }
  }
  EXPECT_EQ(table_->table_bytes(), before + 80 * FixedBytes(1)) << "what they share counts once";
  EXPECT_LE(heap.held_bytes(), table_->table_bytes() - before + kSlackBytes);
}

TEST_F(LongListTest, AnEvictionShrinksThePageList) {
  const std::string origin = Make(0);
  Reserve(origin, 0, kMany * kRows)->Commit();
  const int64_t before = table_->table_bytes();
  const test::HeapWatch heap;
  for (int n = 0; n < 40; ++n) {
    ASSERT_TRUE(table_->Fork(0, origin, {}).ok());
    if (n % 10 == 9) table_->EvictTenant(0, false);
    if (n % 10 == 9) Reserve(origin, 0, kMany * kRows)->Commit();
  }
  EXPECT_EQ(table_->table_bytes(), before + 40 * FixedBytes(1));
  // Evicting shared pages takes more for a moment.
  EXPECT_LE(heap.held_bytes(), 40 * FixedBytes(1) + 4 * kSlackBytes);
}

TEST_F(LongListTest, AnUnusedReservationShrinksThePageList) {
  const int64_t before = table_->table_bytes();
  const test::HeapWatch heap;
  for (int n = 0; n < 80; ++n) Reserve(Make(0), 0, kMany * kRows)->End();
  EXPECT_EQ(table_->table_bytes(), before + 80 * FixedBytes(1));
  EXPECT_LE(heap.held_bytes(), table_->table_bytes() - before + kSlackBytes);
}

TEST_F(LongListTest, ARefusedAppendKeepsNoPageList) {
  std::vector<TenantBounds> bounds(2);
  bounds[0][Limit::kSessionMemory] = kPageBytes;
  limits_.Set(bounds);
  const int64_t before = table_->table_bytes();
  const test::HeapWatch heap;
  for (int n = 0; n < 80; ++n) {
    const CacheUse use{Make(0), 0, 0, ""};
    const auto hold = table_->Hold(0, {&use, 1}, kMany * kRows);
    ASSERT_TRUE(hold.ok()) << hold.status().ToString();
    ASSERT_EQ((*hold)->Reserve(pages_.data(), kMany).code(), Code::kResourceExhausted);
  }
  EXPECT_LE(heap.held_bytes(), table_->table_bytes() - before + kSlackBytes);
}

TEST_F(LongListTest, AReaderKeepsOnlyThePagesThatWereCutOff) {
  const std::string origin = Make(0);
  Reserve(origin, 0, kMany * kRows / 2)->Commit();
  std::vector<PageNumber> pages(kMany);
  const CacheUse use{origin, 0, kMany * kRows / 2, ""};
  const auto reader = table_->Hold(0, {&use, 1}, 0);
  ASSERT_TRUE(reader.ok() && (*reader)->Reserve(pages.data(), kMany).ok());
  const test::HeapWatch heap;
  for (int64_t cut = 1; cut <= 40; ++cut) {
    ASSERT_TRUE(table_->Truncate(0, origin, kMany * kRows / 2 - cut * kRows).ok());
    const CacheUse next{origin, 0, kMany * kRows / 2 - cut * kRows, ""};
    const auto hold = table_->Hold(0, {&next, 1}, 0);
    ASSERT_TRUE(hold.ok() && (*hold)->Reserve(pages_.data(), kMany).ok());
  }
  EXPECT_LE(heap.held_bytes(), kSlackBytes);
}

// In debug builds the audit takes most of the time in both cases.
TEST_F(SessionRoomTest, ExpiredSessionsInUseDoNotSlowDownOtherCalls) {
  Start(TwoTenants(), 4000);
  std::vector<std::unique_ptr<CacheHold>> holds;
  for (int n = 0; n < 8; ++n) {
    std::vector<CacheUse> uses;
    for (int k = 0; k < 250; ++k) uses.push_back({Make(0), 0, 0, ""});
    holds.push_back(*table_->Hold(0, uses, 0));
  }
  const CacheUse use{Make(1), 0, 0, ""};
  const auto least_time = [&] {
    auto least = std::chrono::steady_clock::duration::max();
    for (int n = 0; n < 20; ++n) {
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_TRUE(table_->Hold(1, {&use, 1}, 0).ok());
      least = std::min(least, std::chrono::steady_clock::now() - begin);
    }
    return least;
  };
  const auto before = least_time();
  clock_.Advance(std::chrono::seconds(59));
  EXPECT_TRUE(Exists(1, use.session));
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_LT(least_time(), 10 * before);
}

TEST_F(SessionRoomTest, ATenantsLimitOfSessionsIsEnforced) {
  std::vector<TenantBounds> bounds(2);
  bounds[0][Limit::kSessions] = 2;
  limits_.Set(bounds);
  const std::string first = Make(0), second = Make(0);
  const Status status = table_->Create(0, {0, {kShape}}).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("tenant limit sessions: the tenant has 2, may have"));
  EXPECT_EQ(RejectionOf(status), Rejection::kTenantLimit);
  EXPECT_EQ(RejectionOf(table_->Fork(0, first, {}).status()), Rejection::kTenantLimit);
  EXPECT_EQ(limits_.use(0, Limit::kSessions).refused, 2);
  for (int n = 0; n < 3; ++n) Make(1);
  ASSERT_TRUE(table_->Free(0, first).ok());
  EXPECT_EQ(limits_.use(0, Limit::kSessions).used, 1);
  EXPECT_TRUE(table_->Fork(0, second, {}).ok());
  clock_.Advance(std::chrono::seconds(61));
  table_->Expire();
  EXPECT_EQ(limits_.use(0, Limit::kSessions).used, 0);
}

// Refusals are read by the refused tenant, and must say nothing about others.
TEST_F(SessionRoomTest, ARefusalRevealsNothingAboutOtherTenants) {
  SessionOptions options = TwoTenants();
  options.table_bytes_max = 4 * FixedBytes(1);
  Start(options);
  for (int n = 0; n < 2; ++n) Make(0, 0, true);
  const auto refusal = [&] {
    const Status status = Create(0).status();
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    return std::string(status.message());
  };
  Make(1);
  Make(1);
  const std::string of_two = refusal();
  EXPECT_EQ(of_two, "no room for " + std::to_string(FixedBytes(1)) +
                        " more bytes in the session tables, which may have at most " +
                        std::to_string(4 * FixedBytes(1)) + " (memory-budget); the tenant's have " +
                        std::to_string(2 * FixedBytes(1)) + ", its reserved share is " +
                        std::to_string(FixedBytes(1)));
}

}  // namespace
}  // namespace attend
