// SPDX-License-Identifier: Apache-2.0
//
// Random histories of sessions against a model: create, append (whole, given up, asked for again),
// fork, truncate, free, leases and eviction.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "tests/kernels/support/problems.h"
#include "tests/server/support/table_history.h"

namespace attend {
namespace {

TEST(SessionModelTest, RandomHistories) {
  const uint64_t seed = test::FreshSeed();
  int64_t evictions = 0, others = 0, expired = 0, refused = 0, repeated = 0, shared_cuts = 0,
          exhausted = 0;
  const int histories = std::max(3, static_cast<int>(1000 * test::TestScale()));
  for (int n = 0; n < histories && !::testing::Test::HasFailure(); ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n));
    test::TableHistory history(seed + n);
    for (int step = 0; step < 200 && !::testing::Test::HasFailure(); ++step) {
      history.Step();
      history.Check();
    }
    evictions += history.evictions();
    others += history.evictions_others();
    expired += history.expired();
    refused += history.refused;
    repeated += history.repeated;
    shared_cuts += history.shared_cuts;
    exhausted += history.exhausted;
    history.End();
  }
  // The histories are only worth something if they meet everything.
  EXPECT_GT(evictions, 0);
  EXPECT_GT(others, 0);
  EXPECT_GT(expired, 0);
  EXPECT_GT(refused, 0);
  EXPECT_GT(repeated, 0);
  EXPECT_GT(shared_cuts, 0);
  EXPECT_GT(exhausted, 0);
}

TEST(SessionModelTest, MemoryRunsOutAnywhere) {
  const uint64_t seed = test::FreshSeed();
  int64_t failures = 0, shared_cuts = 0, evictions = 0;
  for (int64_t failing = 1; failing <= 200 && !::testing::Test::HasFailure(); ++failing) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + ", allocation " +
                 std::to_string(failing));
    test::TableHistory history(seed + static_cast<uint64_t>(failing), failing);
    for (int step = 0; step < 100 && !::testing::Test::HasFailure(); ++step) {
      history.Step();
      history.Check();
    }
    failures += history.failures;
    shared_cuts += history.shared_cuts;
    evictions += history.evictions();
    history.End();
  }
  EXPECT_GT(failures, 0);
  EXPECT_GT(shared_cuts, 0);
  EXPECT_GT(evictions, 0);
}

}  // namespace
}  // namespace attend
