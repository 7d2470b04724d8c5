// SPDX-License-Identifier: Apache-2.0
//
// Two tenants whose sessions share pages and are used by running requests.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/server/support/two_tenants_fixture.h"

namespace attend::test {

// Each tenant has 4 of the 16 pages reserved; 8 are common.
class EvictionTest : public test::TwoTenantsTest {
 protected:
  std::string Fork(int tenant, const std::string& id, int64_t tokens, int64_t more = 0) {
    clock_.Advance(std::chrono::milliseconds(1));
    const Result<SessionInfo> fork = table_->Fork(tenant, id, tokens);
    EXPECT_TRUE(fork.ok()) << fork.status().ToString();
    EXPECT_TRUE(more == 0 || Append(tenant, fork->id, tokens, more).ok());
    return fork->id;
  }
  // The hold of a running request.
  std::unique_ptr<CacheHold> Run(int tenant, const std::string& id, int64_t length,
                                 int64_t rows = 0) {
    const CacheUse use{id, 0, length, "append"};
    tables_.push_back(std::vector<PageNumber>(32));
    auto hold = table_->Hold(tenant, {&use, 1}, rows);
    EXPECT_TRUE(hold.ok()) << hold.status().ToString();
    const Status status = (*hold)->Reserve(tables_.back().data(), 32);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return *std::move(hold);
  }
  // Without using the session.
  int64_t Length(int tenant, const std::string& id) {
    for (const SessionInfo& info : table_->List(tenant, "", 100).sessions) {
      if (info.id == id) return info.length;
    }
    return -1;
  }
  int64_t UsedPages() { return table_->memory(0).used_bytes / kPageBytes; }

  std::vector<std::vector<PageNumber>> tables_;  // outlive the holds
};

}  // namespace attend::test
