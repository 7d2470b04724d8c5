// SPDX-License-Identifier: Apache-2.0

#include "server/memory/upload_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace attend {
namespace {

using ::testing::HasSubstr;

TEST(UploadBudget, ALoneTenantMayTakeThreeQuarters) {
  UploadBudget budget(400, {5});
  EXPECT_EQ(budget.bytes_max(0), 300);
  Result<UploadBudget::Hold> most = budget.Take(0, 300);
  ASSERT_TRUE(most.ok());
  EXPECT_EQ(budget.Take(0, 1).status().code(), Code::kResourceExhausted);
  most->Release();
  EXPECT_TRUE(budget.Take(0, 300).ok());
  EXPECT_EQ(budget.Take(0, INT64_MAX).status().code(), Code::kResourceExhausted);
}

TEST(UploadBudget, ATenantsPartIsReserved) {
  UploadBudget budget(800, {1, 2});  // 300 are divided, 300 are common
  EXPECT_EQ(budget.bytes_max(0), 400);
  EXPECT_EQ(budget.bytes_max(1), 500);
  std::vector<UploadBudget::Hold> greedy;
  for (int n = 0; n < 5; ++n) {
    Result<UploadBudget::Hold> hold = budget.Take(1, 100);
    ASSERT_TRUE(hold.ok()) << hold.status().ToString();
    greedy.push_back(std::move(*hold));
  }
  const Status refused = budget.Take(1, 1).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_THAT(
      refused.message(),
      HasSubstr("request needs 1 bytes; the tenant's incomplete uploads hold 500 of at most 500"));
  Result<UploadBudget::Hold> own = budget.Take(0, 100);
  ASSERT_TRUE(own.ok());
  const Status beyond = budget.Take(0, 1).status();
  EXPECT_THAT(beyond.message(), HasSubstr("the tenant's incomplete uploads hold 100 of at most "
                                          "400, of which 100 are reserved for it"));
  greedy.pop_back();
  const Result<UploadBudget::Hold> common = budget.Take(0, 100);
  EXPECT_TRUE(common.ok());
  EXPECT_FALSE(budget.Take(1, 1).ok());
}

}  // namespace
}  // namespace attend
