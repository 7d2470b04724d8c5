// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cmath>

#include "client/call/random.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

TEST(Random, UniformAndNormalHaveTheirMoments) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  constexpr int kCount = 400000;
  double uniform = 0, normal = 0, normal_squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double u = random.Uniform();
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    uniform += u;
    const double x = random.AboutNormal();
    normal += x;
    normal_squares += x * x;
  }
  EXPECT_NEAR(uniform / kCount, 0.5, 6 * 0.289 / std::sqrt(kCount));
  EXPECT_NEAR(normal / kCount, 0.0, 6 / std::sqrt(kCount));
  EXPECT_NEAR(normal_squares / kCount, 1.0, 6 * 1.5 / std::sqrt(kCount));
}

}  // namespace
}  // namespace attend::client
