// SPDX-License-Identifier: Apache-2.0
//
// A session table shared by two tenants, with a clock and limits that a test changes.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend::test {

inline constexpr int64_t kRows = 16;
inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kPages = 16;
inline const LayerShape kShape{DType::kFloat16, 1, 8, 8};

class TwoTenantsTest : public ::testing::Test {
 protected:
  TwoTenantsTest() { Start(TwoTenants()); }
  ~TwoTenantsTest() override { EXPECT_TRUE(table_->Consistent()); }

  // With equal weights.
  static SessionOptions TwoTenants() { return {.tenant_weights = {1, 1}}; }
  void Start(SessionOptions options, int64_t sessions_max = 8) {
    options.page_rows = kRows;
    options.slab_bytes = 4 * kPageBytes;
    options.sessions_max = sessions_max;
    options.limits = &limits_;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&arena_, {}}});
  }
  Result<SessionInfo> Create(int tenant, bool pinned = false) {
    clock_.Advance(std::chrono::milliseconds(1));
    return table_->Create(tenant, {0, {kShape}, std::chrono::seconds(60), pinned});
  }
  std::string Make(int tenant, int64_t tokens = 0, bool pinned = false) {
    const Result<SessionInfo> made = Create(tenant, pinned);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_TRUE(tokens == 0 || Append(tenant, made->id, 0, tokens).ok());
    return made->id;
  }
  Status Append(int tenant, const std::string& id, int64_t length, int64_t rows,
                CacheRefusal* refusal = nullptr, int64_t layer = 0) {
    const CacheUse use{id, layer, length, ""};
    std::vector<PageNumber> pages(256);  // outlives the hold
    const auto hold = table_->Hold(tenant, {&use, 1}, rows, refusal);
    if (!hold.ok()) return hold.status();
    ATTEND_RETURN_IF_ERROR((*hold)->Reserve(pages.data(), std::ssize(pages), refusal));
    (*hold)->Commit();
    return Status();
  }
  bool Exists(int tenant, const std::string& id) { return table_->Get(tenant, id).ok(); }

  ManualClock clock_;
  TenantLimits limits_{std::vector<TenantBounds>(2), clock_};
  TestArena arena_{kPages * kPageBytes + kPageUnitBytes};
  int ids_ = 0;
  std::unique_ptr<SessionTable> table_;
};

}  // namespace attend::test
