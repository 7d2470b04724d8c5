// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cmath>

#include "client/load/workload.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

TEST(Workload, DrawsAreDeterministicAndFollowTheirWeights) {
  ATTEND_FRESH_SEED(seed);
  LoadOptions options;
  options.seed = seed;
  options.mix = {*ParseCallSpec("B1,H1,L4,D8,weight=3"), *ParseCallSpec("B1,H1,L8,D8")};
  options.pool = 3;
  options.verify_share = 0.25;
  options.cancel_share = 0.1;
  options.cancel_after_ms = 4;
  const Result<Workload> workload = Workload::Make(options);
  ASSERT_TRUE(workload.ok()) << workload.status().ToString();
  constexpr int kCount = 40000;
  int first = 0, verified = 0, cancelled = 0;
  for (uint64_t n = 0; n < kCount; ++n) {
    const Workload::Draw draw = workload->DrawRequest(n);
    const Workload::Draw again = workload->DrawRequest(n);
    EXPECT_EQ(draw.item, again.item);
    EXPECT_EQ(draw.seed, again.seed);
    first += draw.item->call.q.shape[2] == 4;
    verified += draw.verify;
    EXPECT_FALSE(draw.check);
    EXPECT_FALSE(draw.deadline);
    if (draw.cancel_after_ms >= 0) {
      ++cancelled;
      EXPECT_LT(draw.cancel_after_ms, 4);
    }
  }
  const auto within = [](int count, double share) {
    return std::abs(count / double{kCount} - share) < 6 * std::sqrt(share * (1 - share) / kCount);
  };
  EXPECT_TRUE(within(first, 0.75)) << first;
  EXPECT_TRUE(within(verified, 0.25)) << verified;
  EXPECT_TRUE(within(cancelled, 0.1)) << cancelled;
}

}  // namespace
}  // namespace attend::client
