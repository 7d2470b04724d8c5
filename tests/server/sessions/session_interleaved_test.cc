// SPDX-License-Identifier: Apache-2.0
//
// Random histories with several requests under way, against a model
// (tests/server/support/interleaved_history.h). tests/fuzz/sessions_fuzz.cc searches for histories.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "tests/kernels/support/problems.h"
#include "tests/server/support/interleaved_history.h"

namespace attend::test {
namespace {

TEST(SessionInterleavedTest, RandomHistories) {
  const uint64_t seed = FreshSeed();
  InterleavedHistory::Counts counts;
  const int histories = std::max(100, static_cast<int>(400 * TestScale()));  // so that all is met
  for (int n = 0; n < histories && !::testing::Test::HasFailure(); ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n));
    std::mt19937_64 random(seed + n);
    InterleavedHistory history([&random](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    });
    for (int step = 0; step < 300 && !::testing::Test::HasFailure(); ++step) history.Step();
    for (const auto& [what, count] : history.counts()) counts[what] += count;
    if (!::testing::Test::HasFailure()) history.End();
  }
  // The histories are only worth something if they meet everything.
  for (const char* const what :
       {"displaced", "evictions", "evictions of others", "exhausted", "expired", "freed in use",
        "given up", "refused", "refused late", "repeated", "shared cuts"}) {
    EXPECT_GT(counts[what], 0) << what;
  }
}

}  // namespace
}  // namespace attend::test
