// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/fair_share.h"

#include <gtest/gtest.h>

#include <vector>

namespace attend {
namespace {

// Serves the tenant with the lowest tag, as if all always had work.
int Serve(FairShare& share, const std::vector<int64_t>& costs) {
  int next = 0;
  for (int t = 1; t < std::ssize(costs); ++t) {
    if (share.Tag(t) < share.Tag(next)) next = t;
  }
  share.Charge(next, costs[next], share.Tag(next));
  return next;
}

TEST(FairShare, ChargesByCostAndWeight) {
  FairShare share({1, 4});
  share.Charge(0, kBatchCost, 0);
  share.Charge(1, kBatchCost, 0);
  EXPECT_EQ(share.Tag(0), 4 * share.Tag(1));
  EXPECT_EQ(share.Tag(0), share.Batch(0));
  EXPECT_EQ(share.Tag(1), share.Batch(1));
}

TEST(FairShare, WeightZeroCountsAsTheSmallestWeight) {
  FairShare share({0, 4});
  share.Charge(0, kBatchCost, 0);
  share.Charge(1, kBatchCost, 0);
  EXPECT_EQ(share.Tag(0), 4 * share.Tag(1));
  EXPECT_EQ(share.Tag(0), share.Batch(0));
}

TEST(FairShare, ChargesRoundUp) {
  FairShare share({kTenantWeightMax, 999});
  share.Charge(0, 1, 0);
  share.Charge(1, 1, 0);
  EXPECT_EQ(share.Tag(0), 1);
  EXPECT_EQ(share.Tag(1), 2);
}

TEST(FairShare, IdleTimeAccumulatesNoShare) {
  FairShare share({1, 1});
  share.Arrive(0);
  for (int i = 0; i < 100; ++i) share.Charge(0, kBatchCost, share.Tag(0));
  share.Arrive(1);
  EXPECT_EQ(share.Tag(1), share.Tag(0) - share.Batch(0)) << "where the last start was";
  share.Charge(1, kBatchCost, share.Tag(1));
  EXPECT_EQ(share.Tag(1), share.Tag(0));
}

TEST(FairShare, ATenantThatCouldNotStartIsOwedAtMostABatch) {
  FairShare share({1, 1});
  share.Arrive(0);
  share.Arrive(1);
  // Tenant 1 waits with requests that no lane may take now: its tag is not a lower bound.
  for (int i = 0; i < 100; ++i) share.Charge(0, kBatchCost, share.Tag(0));
  int served = 0;
  while (Serve(share, {kBatchCost, kBatchCost}) == 1) ++served;
  EXPECT_GE(served, 1);
  EXPECT_LE(served, 3);
}

TEST(FairShare, ResetClearsAllTags) {
  FairShare share({1, 1});
  share.Charge(0, kBatchCost, 0);
  share.Reset();
  EXPECT_EQ(share.Tag(0), share.Tag(1));
}

// The sum of all charges exceeds 63 bits many times over; shares stay exact.
TEST(FairShare, TagsNeitherDriftNorOverflow) {
  FairShare share({1, 3});
  std::vector<int64_t> served(2);
  int64_t largest = 0;
  for (int i = 0; i < 400'000; ++i) {
    ++served[Serve(share, {kCostMax, kCostMax})];
    ASSERT_GE(share.Tag(0), 0);
    ASSERT_GE(share.Tag(1), 0);
    largest = std::max(largest, std::max(share.Tag(0), share.Tag(1)));
    ASSERT_LE(std::abs(3 * served[0] - served[1]), 4);
  }
  EXPECT_GT(largest, int64_t{1} << 60) << "too short to come near the end";
}

}  // namespace
}  // namespace attend
