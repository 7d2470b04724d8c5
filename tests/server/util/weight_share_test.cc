// SPDX-License-Identifier: Apache-2.0

#include "server/util/weight_share.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace attend {
namespace {

TEST(WeightShare, DivisibleTotalsAreExact) {
  for (const int32_t weight : {1, 3, 7, 48, 1000}) {
    const TenantWeights weights = {1, weight};
    const int64_t part = int64_t{256} << 20;
    const int64_t all = (1 + weight) * part;
    EXPECT_EQ(ShareOf(weights, 0, all), part) << weight;
    EXPECT_EQ(ShareOf(weights, 1, all), weight * part) << weight;
  }
}

TEST(WeightShare, SharesNeverExceedTheTotal) {
  const TenantWeights weights = {1, 1, 1};
  EXPECT_EQ(ShareOf(weights, 0, 8), 2);
  EXPECT_EQ(ShareOf(weights, 2, INT64_MAX), INT64_MAX / 3);
  EXPECT_EQ(ShareOf({INT32_MAX}, 0, INT64_MAX), INT64_MAX);
}

}  // namespace
}  // namespace attend
