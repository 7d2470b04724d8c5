// SPDX-License-Identifier: Apache-2.0
//
// An operator lists, frees and evicts sessions of any tenant, while requests use them.

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPages = 64;
const LayerShape kShape{DType::kFloat16, 1, 8, 8};

class SessionOperatorTest : public ::testing::Test {
 protected:
  SessionOperatorTest() {
    SessionOptions options{.tenant_weights = {1, 1}};
    options.page_rows = kRows;
    options.slab_bytes = 4 * kPageBytes;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&arena_, {}}});
  }
  ~SessionOperatorTest() override { EXPECT_TRUE(table_->Consistent()); }

  std::string Make(int tenant, int64_t tokens, bool pinned = false) {
    const Result<SessionInfo> made =
        table_->Create(tenant, {0, {kShape, kShape}, std::chrono::seconds(60), pinned});
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<PageNumber> table;
      EXPECT_TRUE(Hold(tenant, made->id, layer, 0, tokens, table, true) != nullptr);
    }
    return made->id;
  }
  // Begins an append to the session; null if it is refused.
  std::unique_ptr<CacheHold> Hold(int tenant, const std::string& id, int layer, int64_t length,
                                  int64_t rows, std::vector<PageNumber>& table, bool commit) {
    const CacheUse use{id, layer, length, ""};
    Result<std::unique_ptr<CacheHold>> hold = table_->Hold(tenant, {&use, 1}, rows);
    if (!hold.ok()) return nullptr;
    table.resize(static_cast<size_t>((length + rows + kRows - 1) / kRows));
    EXPECT_TRUE((*hold)->Reserve(table.data(), std::ssize(table)).ok());
    if (commit && rows > 0) (*hold)->Commit();
    return std::move(*hold);
  }
  int64_t Length(int tenant, const std::string& id) {
    const Result<SessionInfo> info = table_->Get(tenant, id);
    return info.ok() ? info->length : -1;
  }

  test::ManualClock clock_;
  test::TestArena arena_{kPages * kPageBytes + kPageUnitBytes};
  std::atomic<int> ids_ = 0;
  std::unique_ptr<SessionTable> table_;
};

TEST_F(SessionOperatorTest, ListsAllTenantsSessionsInPages) {
  std::vector<std::string> made;
  for (int n = 0; n < 5; ++n) made.push_back(Make(n % 2, kRows));
  std::vector<SessionInfo> listed;
  for (std::string after;;) {
    const SessionTable::Listed page = table_->ListAll(after, 2);
    listed.insert(listed.end(), page.sessions.begin(), page.sessions.end());
    if (!page.more) break;
    after = page.sessions.back().id;
  }
  ASSERT_EQ(listed.size(), 5u);
  for (size_t n = 0; n < 5; ++n) {
    EXPECT_EQ(listed[n].id, made[n]);
    EXPECT_EQ(listed[n].tenant, static_cast<int>(n % 2));
    EXPECT_EQ(listed[n].bytes, 2 * kPageBytes);
  }
  EXPECT_EQ(table_->tenant_sessions(), (std::vector<int64_t>{3, 2}));
}

TEST_F(SessionOperatorTest, FreesOneSessionOrAllOfATenant) {
  const std::string one = Make(0, kRows);
  const std::string two = Make(0, kRows);
  const std::string others = Make(1, kRows);
  EXPECT_TRUE(table_->FreeAny(others));
  EXPECT_FALSE(table_->FreeAny(others));
  EXPECT_FALSE(table_->FreeAny(""));
  EXPECT_EQ(table_->FreeTenant(1), 0);
  EXPECT_EQ(table_->FreeTenant(0), 2);
  EXPECT_EQ(Length(0, one), -1);
  EXPECT_EQ(table_->memory(0).used_bytes, 0);
}

TEST_F(SessionOperatorTest, AFreedSessionInUseEndsWithItsLastUse) {
  const std::string id = Make(0, 2 * kRows);
  std::vector<PageNumber> table;
  std::unique_ptr<CacheHold> hold = Hold(0, id, 0, 2 * kRows, 0, table, false);
  ASSERT_NE(hold, nullptr);
  EXPECT_EQ(table_->FreeTenant(0), 1);
  EXPECT_EQ(table_->memory(0).used_bytes, 4 * kPageBytes);
  hold.reset();
  EXPECT_EQ(table_->memory(0).used_bytes, 0);
}

TEST_F(SessionOperatorTest, EvictsIdleSessionsAndOnRequestPinnedOnes) {
  const std::string idle = Make(0, 3 * kRows);
  const std::string pinned = Make(0, kRows, true);
  const std::string used = Make(0, kRows);
  const std::string others = Make(1, kRows);
  std::vector<PageNumber> table;
  std::unique_ptr<CacheHold> hold = Hold(0, used, 0, kRows, 0, table, false);
  SessionTable::Evicted evicted = table_->EvictTenant(0, false);
  EXPECT_EQ(evicted.sessions, 1);
  EXPECT_EQ(evicted.bytes, 6 * kPageBytes);
  EXPECT_EQ(Length(0, idle), 0);
  EXPECT_EQ(Length(0, pinned), kRows);
  EXPECT_EQ(Length(0, used), kRows);
  EXPECT_EQ(Length(1, others), kRows);
  hold.reset();
  evicted = table_->EvictTenant(0, true);
  EXPECT_EQ(evicted.sessions, 2);
  EXPECT_EQ(evicted.bytes, 4 * kPageBytes);
  EXPECT_EQ(table_->EvictTenant(0, true).sessions, 0);
  EXPECT_EQ(table_->stats().evictions_operator, 3);
  EXPECT_EQ(table_->stats().evicted_bytes, 10 * kPageBytes);
  // It can be filled again; until then it reports its remaining length.
  EXPECT_EQ(Hold(0, idle, 0, 3 * kRows, 1, table, false), nullptr);
  EXPECT_NE(Hold(0, idle, 0, 0, kRows, table, true), nullptr);
}

TEST_F(SessionOperatorTest, PagesSharedWithOtherSessionsStay) {
  const std::string origin = Make(0, 2 * kRows);
  const Result<SessionInfo> fork = table_->Fork(0, origin, std::nullopt);
  ASSERT_TRUE(fork.ok());
  std::vector<PageNumber> table;
  std::unique_ptr<CacheHold> hold = Hold(0, fork->id, 0, 2 * kRows, 0, table, false);
  const SessionTable::Evicted evicted = table_->EvictTenant(0, true);
  EXPECT_EQ(evicted.sessions, 1);
  EXPECT_EQ(evicted.bytes, 0);
  EXPECT_EQ(Length(0, fork->id), 2 * kRows);
}

TEST_F(SessionOperatorTest, OperatorCallsAreSafeBesideOtherThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> working{3};
  std::atomic<int> next{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int n = 0; n < 100; ++n) {
        const int tenant = (t + n) % 2;
        const Result<SessionInfo> made =
            table_->Create(tenant, {0, {kShape}, std::chrono::seconds(60), n % 3 == 0});
        if (!made.ok()) continue;  // full: the operator frees some
        std::vector<PageNumber> table;
        const CacheUse use{made->id, 0, 0, ""};
        const auto hold = table_->Hold(tenant, {&use, 1}, kRows);
        if (!hold.ok()) continue;  // freed meanwhile
        table.resize(1);
        if ((*hold)->Reserve(table.data(), 1).ok()) (*hold)->Commit();
      }
      --working;
    });
  }
  while (working > 0) {
    const int turn = next++;
    table_->EvictTenant(turn % 2, turn % 3 == 0);
    for (const SessionInfo& info : table_->ListAll("", 3).sessions) table_->FreeAny(info.id);
    if (turn % 5 == 0) table_->FreeTenant(turn % 2);
    std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  table_->FreeTenant(0);
  table_->FreeTenant(1);
  EXPECT_EQ(table_->memory(0).used_bytes, 0);
  EXPECT_EQ(table_->stats().sessions, 0);
}

}  // namespace
}  // namespace attend
