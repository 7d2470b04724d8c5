// SPDX-License-Identifier: Apache-2.0

#include "client/load/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace attend::client {
namespace {

constexpr int kLinearBits = 8;                        // values below 2^8 have a bucket each
constexpr int kPerDoubling = 1 << (kLinearBits - 1);  // buckets per doubling above that

}  // namespace

int Histogram::IndexOf(int64_t value) {
  if (value < (1 << kLinearBits)) return static_cast<int>(value);
  const int shift = 64 - std::countl_zero(static_cast<uint64_t>(value)) - kLinearBits;
  // value >> shift is in [128, 256).
  return (1 << kLinearBits) + (shift - 1) * kPerDoubling + static_cast<int>(value >> shift) -
         kPerDoubling;
}

int64_t Histogram::BucketEnd(int index) {
  if (index < (1 << kLinearBits)) return index;
  const int above = index - (1 << kLinearBits);
  const int shift = above / kPerDoubling + 1;
  const int64_t mantissa = above % kPerDoubling + kPerDoubling;
  return ((mantissa + 1) << shift) - 1;
}

void Histogram::Record(int64_t value) {
  value = std::clamp<int64_t>(value, 0, kValueMax);
  const auto index = static_cast<size_t>(IndexOf(value));
  if (index >= counts_.size()) counts_.resize(index + 1);
  ++counts_[index];
  min_ = count_ == 0 ? value : std::min(min_, value);
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
  ++count_;
}

void Histogram::Merge(const Histogram& other) {
  if (other.count_ == 0) return;
  counts_.resize(std::max(counts_.size(), other.counts_.size()));
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] += other.counts_[i];
  min_ = count_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
  count_ += other.count_;
}

void Histogram::Clear() { *this = Histogram(); }

int64_t Histogram::ValueAt(double quantile) const {
  if (count_ == 0) return 0;
  const double target = std::ceil(std::clamp(quantile, 0.0, 1.0) * static_cast<double>(count_));
  const int64_t rank = std::max<int64_t>(1, static_cast<int64_t>(target));
  int64_t seen = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    seen += counts_[i];
    if (seen >= rank) return std::min(BucketEnd(static_cast<int>(i)), max_);
  }
  return max_;
}

std::vector<Histogram::Bucket> Histogram::Buckets(int per_doubling) const {
  const int joined = kPerDoubling / std::clamp(per_doubling, 1, kPerDoubling);
  std::vector<Bucket> buckets;
  for (int i = 0; i < static_cast<int>(counts_.size()); i += joined) {
    const int end = std::min(i + joined, static_cast<int>(counts_.size()));
    int64_t count = 0;
    for (int j = i; j < end; ++j) count += counts_[static_cast<size_t>(j)];
    if (count == 0) continue;
    const int64_t lower = i == 0 ? 0 : BucketEnd(i - 1) + 1;
    buckets.push_back({std::max(lower, min_), std::min(BucketEnd(i + joined - 1), max_), count});
  }
  return buckets;
}

}  // namespace attend::client
