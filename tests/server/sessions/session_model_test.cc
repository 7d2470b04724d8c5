// SPDX-License-Identifier: Apache-2.0
//
// Random histories of sessions against a model (tests/server/support/table_history.h).
// tests/fuzz/sessions_fuzz.cc searches for histories.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>

#include "tests/kernels/support/counted_new.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/table_history.h"

namespace attend::test {
namespace {

// `failing`: in a third of its operations, this allocation fails; 0: none does.
void RunHistory(uint64_t seed, int steps, int64_t failing, TableHistory::Counts& counts) {
  std::mt19937_64 random(seed);
  TableHistory::Shortage shortage;
  if (failing > 0) {
    shortage = [&random, failing]() -> std::shared_ptr<void> {
      return random() % 3 > 0 ? nullptr : std::make_shared<HeapFault>(failing);
    };
  }
  TableHistory history(
      [&random](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
      },
      shortage);
  for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) history.Step();
  for (const auto& [what, count] : history.counts()) counts[what] += count;
  if (!::testing::Test::HasFailure()) history.End();
}

// The histories are only worth something if they meet everything.
void ExpectMet(TableHistory::Counts& counts, std::initializer_list<const char*> all) {
  for (const char* const what : all) EXPECT_GT(counts[what], 0) << what;
}

TEST(SessionModelTest, RandomHistories) {
  const uint64_t seed = FreshSeed();
  TableHistory::Counts counts;
  const int histories = std::max(100, static_cast<int>(1000 * TestScale()));  // so that all is met
  for (int n = 0; n < histories && !::testing::Test::HasFailure(); ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n));
    RunHistory(seed + n, 300, 0, counts);
  }
  ExpectMet(counts,
            {"claims", "displaced", "evicted before the commit", "evicted in use", "evictions",
             "evictions of others", "exhausted", "expired", "freed in use", "gave way", "given up",
             "had all after giving way", "pinned refused", "refused", "refused after giving way",
             "refused as evicted", "refused late", "repeated", "shared cuts"});
}

TEST(SessionModelTest, MemoryRunsOutAnywhere) {
  const uint64_t seed = FreshSeed();
  TableHistory::Counts counts;
  for (int64_t failing = 1; failing <= 200 && !::testing::Test::HasFailure(); ++failing) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + ", allocation " +
                 std::to_string(failing));
    RunHistory(seed + static_cast<uint64_t>(failing), 300, failing, counts);
  }
  ExpectMet(counts, {"evicted in use", "evictions", "expired", "failed allocations", "freed in use",
                     "gave way", "given up", "repeated", "shared cuts"});
}

}  // namespace
}  // namespace attend::test
