// SPDX-License-Identifier: Apache-2.0

#include "client/load/histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "client/call/random.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

// The rank that ValueAt specifies, on sorted values.
int64_t Exact(const std::vector<int64_t>& sorted, double quantile) {
  const double target = std::ceil(quantile * static_cast<double>(sorted.size()));
  return sorted[static_cast<size_t>(std::max(1.0, target)) - 1];
}

TEST(Histogram, EmptyIsZero) {
  const Histogram h;
  EXPECT_EQ(h.count(), 0);
  EXPECT_EQ(h.ValueAt(0.99), 0);
  EXPECT_EQ(h.min(), 0);
  EXPECT_EQ(h.max(), 0);
  EXPECT_EQ(h.mean(), 0);
}

TEST(Histogram, SmallValuesAreExact) {
  for (int64_t value = 0; value < 256; ++value) {
    Histogram h;
    h.Record(value);
    h.Record(100000);  // so that max() does not give the answer away
    EXPECT_EQ(h.ValueAt(0.5), value);
  }
}

TEST(Histogram, IsNeverBelowNorFurtherAboveThanTheError) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 20; ++round) {
    Histogram h;
    std::vector<int64_t> values;
    const double octaves = 1 + 45 * random.Uniform();
    for (int i = 0; i < 5000; ++i) {
      values.push_back(static_cast<int64_t>(std::exp2(octaves * random.Uniform())));
      h.Record(values.back());
    }
    std::sort(values.begin(), values.end());
    for (const double quantile : {0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 1.0}) {
      const int64_t exact = Exact(values, quantile);
      EXPECT_GE(h.ValueAt(quantile), exact) << quantile;
      EXPECT_LE(static_cast<double>(h.ValueAt(quantile)),
                static_cast<double>(exact) * (1 + Histogram::kRelativeError))
          << quantile;
    }
    EXPECT_EQ(h.min(), values.front());
    EXPECT_EQ(h.max(), values.back());
    EXPECT_EQ(h.ValueAt(1.0), values.back());
  }
}

TEST(Histogram, BucketEdgesAreExact) {
  for (int bit = 8; bit < 47; ++bit) {
    for (const int64_t value :
         {(int64_t{1} << bit) - 1, int64_t{1} << bit, (int64_t{1} << bit) + 1}) {
      Histogram h;
      h.Record(value);
      h.Record(Histogram::kValueMax);
      EXPECT_GE(h.ValueAt(0.5), value);
      EXPECT_LE(static_cast<double>(h.ValueAt(0.5)),
                static_cast<double>(value) * (1 + Histogram::kRelativeError));
    }
  }
}

TEST(Histogram, ClampsValuesOutOfRange) {
  Histogram h;
  h.Record(-5);
  h.Record(INT64_MAX);
  EXPECT_EQ(h.min(), 0);
  EXPECT_EQ(h.max(), Histogram::kValueMax);
  EXPECT_EQ(h.ValueAt(1.0), Histogram::kValueMax);
}

TEST(Histogram, MergeEqualsRecordingTogether) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  Histogram all, left, right;
  for (int i = 0; i < 10000; ++i) {
    const int64_t value = random.Below(int64_t{1} << 35);
    all.Record(value);
    (random.Uniform() < 0.3 ? left : right).Record(value);
  }
  Histogram merged;
  merged.Merge(left);
  merged.Merge(Histogram());
  merged.Merge(right);
  EXPECT_EQ(merged.count(), all.count());
  EXPECT_EQ(merged.min(), all.min());
  EXPECT_EQ(merged.max(), all.max());
  EXPECT_NEAR(merged.mean(), all.mean(), 1e-9 * all.mean());
  for (double quantile = 0; quantile <= 1; quantile += 0.01) {
    EXPECT_EQ(merged.ValueAt(quantile), all.ValueAt(quantile));
  }
  merged.Clear();
  EXPECT_EQ(merged.count(), 0);
  EXPECT_EQ(merged.ValueAt(0.5), 0);
}

TEST(Histogram, BucketsHoldEveryValueOnce) {
  Histogram h;
  std::vector<int64_t> values = {0, 1, 255, 256, 1000, 1001, 123456789, Histogram::kValueMax};
  for (const int64_t value : values) h.Record(value);
  for (const int per_doubling : {1, 16, 128}) {
    int64_t last = -1;
    size_t seen = 0;
    for (const Histogram::Bucket& bucket : h.Buckets(per_doubling)) {
      EXPECT_GT(bucket.lower, last);
      EXPECT_GE(bucket.upper, bucket.lower);
      last = bucket.upper;
      const auto within = std::count_if(values.begin(), values.end(), [&](int64_t value) {
        return value >= bucket.lower && value <= bucket.upper;
      });
      EXPECT_EQ(bucket.count, within);
      seen += static_cast<size_t>(within);
    }
    EXPECT_EQ(seen, values.size());
  }
  EXPECT_TRUE(Histogram().Buckets(16).empty());
}

}  // namespace
}  // namespace attend::client
