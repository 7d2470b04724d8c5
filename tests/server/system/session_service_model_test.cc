// SPDX-License-Identifier: Apache-2.0
//
// Random histories of sessions at whole servers, against a model in double precision. The table's
// own are in sessions/session_model_test.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/server/support/session_history.h"

namespace attend::test {
namespace {

TEST(SessionServiceModel, RandomHistories) {
  const uint64_t seed = FreshSeed();
  constexpr int kSteps = 60;
  const int histories = std::max(3, static_cast<int>(40 * TestScale()));
  SessionHistory::Counts sum;
  for (int n = 0; n < histories && !::testing::Test::HasFailure(); ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n));
    SessionHistory history(seed + n);
    for (int step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) history.Step();
    if (!::testing::Test::HasFailure()) history.End();
    for (const auto& [what, count] : history.counts()) sum[what] += count;
  }
  if (histories < 40) return;
  // The histories are only worth something if they meet what is not rare.
  for (const char* const what :
       {"answered", "evicted", "expired", "forked", "cut", "again", "wrong lengths", "malformed",
        "abandoned", "in flight", "cancelled", "failed", "page edges", "not in host memory"}) {
    EXPECT_GT(sum[what], 0) << what;
  }
}

}  // namespace
}  // namespace attend::test
