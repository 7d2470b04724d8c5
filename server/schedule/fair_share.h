// SPDX-License-Identifier: Apache-2.0
//
// Fair sharing of a device between tenants, by cost and weight: start-time fair queueing. Each
// tenant has a tag, the virtual time at which its next request should start. Starting a request
// advances the tag by cost / weight, and the tenant furthest behind goes next. The virtual time is
// the smallest tag of the tenants that could start, at the last start.
//
// A tenant with nothing waiting resumes at the virtual time, so idling earns no credit. Requests
// that never start (cancelled, expired) are never charged. A tenant whose requests could not start
// for another reason is owed at most one batch.
//
// Cost is a request's share of a batch's budgets (see Batcher::Cost). Costs and tags are integers,
// so sums are exact however long the server runs; they are rebased before they overflow. Rounding
// up costs a request at most one unit of virtual time, 1e-6 of the smallest cost at weight 1.
//
// A plain value: planning a batch charges a copy, and the queue then applies the same charges to
// the original. Not thread-safe.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/schedule/tenants.h"
#include "server/util/weight_share.h"

namespace attend {

inline constexpr int64_t kBatchCost = int64_t{1} << 20;  // the whole budget of a batch
inline constexpr int64_t kCostMin = kBatchCost >> 10;    // no request is free
inline constexpr int64_t kCostMax = kBatchCost << 20;

class FairShare {
 public:
  // One weight for each tenant, at most kTenantWeightMax; 0 counts as 1.
  explicit FairShare(const TenantWeights& weights);

  // A request of the tenant arrives while it had none waiting.
  void Arrive(int tenant) { tags_[tenant] = std::max(tags_[tenant], virtual_time_); }
  // Call when nothing waits and nothing runs: no tenant is owed anything then.
  void Reset();

  int64_t Tag(int tenant) const { return std::max(tags_[tenant], virtual_time_ - Batch(tenant)); }
  // The virtual time that a full batch costs the tenant.
  int64_t Batch(int tenant) const { return fixed_->batch[tenant]; }
  // A request of the tenant starts. `floor`: the smallest Tag() of the tenants that could start.
  void Charge(int tenant, int64_t cost, int64_t floor);

 private:
  void Rebase();

  // Shared by copies.
  struct Fixed {
    TenantWeights weights;
    std::vector<int64_t> batch;
  };

  int64_t virtual_time_ = 0;
  std::vector<int64_t> tags_;
  std::shared_ptr<const Fixed> fixed_;
};

}  // namespace attend
