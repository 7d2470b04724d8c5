// SPDX-License-Identifier: Apache-2.0
//
// Random histories of sessions compared with a model (tests/server/support/table_history.h).

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

// `failing`: in a third of the operations this allocation fails; 0: none does.
void RunHistory(uint64_t seed, int64_t failing, TableHistory::Counts& counts) {
  constexpr int kSteps = 300;
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
  for (int step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) history.Step();
  for (const auto& [what, count] : history.counts()) counts[what] += count;
  if (!::testing::Test::HasFailure()) history.End();
}

// The histories prove something only if they meet every case: more are run until they have. The
// n-th of every `failing_max` runs out of memory at its n-th allocation.
void RunHistories(int at_least, int64_t failing_max, std::initializer_list<const char*> all) {
  const uint64_t seed = FreshSeed();
  TableHistory::Counts counts;
  const auto met = [&counts](const char* what) { return counts[what] > 0; };
  const auto goes_on = [&](int n) {
    return n < at_least || (n < 10 * at_least && !std::all_of(all.begin(), all.end(), met));
  };
  for (int n = 0; goes_on(n) && !::testing::Test::HasFailure(); ++n) {
    const int64_t failing = failing_max == 0 ? 0 : 1 + n % failing_max;
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + ", allocation " +
                 std::to_string(failing));
    RunHistory(seed + n, failing, counts);
  }
  if (::testing::Test::HasFailure()) return;
  for (const char* const what : all) EXPECT_TRUE(met(what)) << what;
}

TEST(SessionModelTest, RandomHistoriesAgreeWithTheModel) {
  RunHistories(
      std::max(100, static_cast<int>(1000 * TestScale())), 0,
      {"drafts kept", "drafts kept again", "evictions", "evictions of others", "exhausted",
       "exhausted by pages alike", "expired", "freed in use", "given up", "refused",
       "refused as evicted", "refused late", "repeated", "sessions refused", "shared cuts"});
}

TEST(SessionModelTest, RandomHistoriesWithoutMemoryAgreeWithTheModel) {
  RunHistories(200, 200,
               {"drafts kept", "evictions", "expired", "failed allocations", "freed in use",
                "given up", "repeated", "shared cuts"});
}

}  // namespace
}  // namespace attend::test
