// SPDX-License-Identifier: Apache-2.0
//
// A histogram of durations with bounded relative error and constant memory, after HdrHistogram
// (log-linear buckets): values below 256 are exact, above that 128 buckets to every doubling, so
// that a reported value is at most 1/128 above the true one. Recording is a few instructions. One
// owner, or the owner's lock.

#pragma once

#include <cstdint>
#include <vector>

namespace attend::client {

class Histogram {
 public:
  // Values above this (about 39 hours in nanoseconds) are counted as this.
  static constexpr int64_t kValueMax = (int64_t{1} << 47) - 1;
  // The most by which ValueAt may exceed the true value, as a share of it.
  static constexpr double kRelativeError = 1.0 / 128;

  void Record(int64_t value);  // below 0 counts as 0
  void Merge(const Histogram& other);
  void Clear();

  int64_t count() const { return count_; }
  int64_t min() const { return count_ == 0 ? 0 : min_; }
  int64_t max() const { return count_ == 0 ? 0 : max_; }
  double mean() const { return count_ == 0 ? 0.0 : sum_ / static_cast<double>(count_); }
  // The smallest bucket end that at least `quantile` of the values do not exceed, and never more
  // than max(). quantile in [0, 1]; 0 if there are no values.
  int64_t ValueAt(double quantile) const;

  // Values within [lower, upper]. Buckets without values are left out.
  struct Bucket {
    int64_t lower;
    int64_t upper;
    int64_t count;
  };
  // At most `per_doubling` of them to every doubling, a power of two up to 128; from low to high.
  std::vector<Bucket> Buckets(int per_doubling) const;

 private:
  static int IndexOf(int64_t value);
  static int64_t BucketEnd(int index);

  std::vector<int64_t> counts_;  // as many as the largest value needs
  int64_t count_ = 0;
  int64_t min_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace attend::client
