// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/fair_share.h"

#include <cassert>
#include <utility>

namespace attend {
namespace {

// The largest charge, kCostMax at weight 1, is below 2^50, so adding one cannot overflow.
constexpr int64_t kRebaseAt = int64_t{1} << 61;

int64_t VirtualCost(int64_t cost, int32_t weight) {
  return (cost * kTenantWeightMax + weight - 1) / weight;
}

}  // namespace

FairShare::FairShare(const TenantWeights& weights) : tags_(weights.size()) {
  Fixed fixed{weights, {}};
  for (int32_t& weight : fixed.weights) {
    weight = std::max(weight, 1);
    fixed.batch.push_back(VirtualCost(kBatchCost, weight));
  }
  fixed_ = std::make_shared<const Fixed>(std::move(fixed));
}

void FairShare::Reset() {
  virtual_time_ = 0;
  std::fill(tags_.begin(), tags_.end(), 0);
}

void FairShare::Charge(int tenant, int64_t cost, int64_t floor) {
  assert(0 < cost && cost <= kCostMax);
  virtual_time_ = std::max(virtual_time_, floor);
  tags_[tenant] = Tag(tenant) + VirtualCost(cost, fixed_->weights[tenant]);
  if (virtual_time_ > kRebaseAt) Rebase();
}

void FairShare::Rebase() {
  // A tag more than a batch behind counts as a batch behind, so cutting it there changes nothing.
  const int64_t shift = virtual_time_ - VirtualCost(kBatchCost, 1);
  virtual_time_ -= shift;
  for (int64_t& tag : tags_) tag = std::max<int64_t>(0, tag - shift);
}

}  // namespace attend
