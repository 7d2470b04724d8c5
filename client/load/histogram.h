// SPDX-License-Identifier: Apache-2.0
//
// A histogram of durations with bounded relative error and constant memory, after HdrHistogram
// (log-linear buckets): values below 256 are exact, and above that each doubling has 128 buckets,
// so a reported value exceeds the true one by at most 1/128. Recording takes a few instructions.
// Not thread-safe.

#pragma once

#include <cstdint>
#include <vector>

namespace attend::client {

class Histogram {
 public:
  // Larger values (above about 39 hours in nanoseconds) count as this.
  static constexpr int64_t kValueMax = (int64_t{1} << 47) - 1;
  // The relative amount by which ValueAt may exceed the true value.
  static constexpr double kRelativeError = 1.0 / 128;

  void Record(int64_t value);  // negative values count as 0
  void Merge(const Histogram& other);
  void Clear();

  int64_t count() const { return count_; }
  int64_t min() const { return count_ == 0 ? 0 : min_; }
  int64_t max() const { return count_ == 0 ? 0 : max_; }
  double mean() const { return count_ == 0 ? 0.0 : sum_ / static_cast<double>(count_); }
  // The smallest bucket end that at least a share `quantile` of the values does not exceed, at most
  // max(). `quantile` in [0, 1]. 0 if there are no values.
  int64_t ValueAt(double quantile) const;

  // Values within [lower, upper]. Empty buckets are left out.
  struct Bucket {
    int64_t lower;
    int64_t upper;
    int64_t count;
  };
  // At most `per_doubling` buckets per doubling, a power of two up to 128; ascending.
  std::vector<Bucket> Buckets(int per_doubling) const;

 private:
  static int IndexOf(int64_t value);
  static int64_t BucketEnd(int index);

  std::vector<int64_t> counts_;  // sized by the largest value
  int64_t count_ = 0;
  int64_t min_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace attend::client
