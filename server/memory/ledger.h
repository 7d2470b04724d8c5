// SPDX-License-Identifier: Apache-2.0
//
// Divides a shared resource among tenants. Half is split by weight into each tenant's own part, at
// least one unit unless its weight is 0. The rest is common, first come, first served. A single
// tenant has no own part: everything is common.
//
// Invariant: what tenants hold beyond their own parts never exceeds the common rest. So a tenant's
// own part is always free for it, however much others hold and for however long, and nothing in use
// ever has to be reclaimed. Idle holdings may be: the tenant's own, or those of a tenant beyond its
// part (Beyond).
//
// Every call is O(1). Not thread-safe: the ledgers of pages, sessions and session tables are
// guarded by the session table's lock, that of regions by their registry's, that of uploads by
// UploadBudget's. Tensor memory is divided alike, by address (host_pool.h).

#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "server/util/weight_share.h"

namespace attend {

struct TenantParts {
  std::vector<int64_t> own;  // by tenant
  int64_t common = 0;
};

// Own parts are multiples of `unit`: at least one unit for a non-zero weight, if there are two
// units per tenant.
inline TenantParts DivideByWeight(int64_t all, const TenantWeights& weights, int64_t unit = 1) {
  TenantParts parts{std::vector<int64_t>(weights.size()), all};
  if (weights.size() < 2) return parts;
  const int64_t least = all / 2 / unit >= std::ssize(weights) ? unit : 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t share = ShareOf(weights, static_cast<int>(i), all / 2) / unit * unit;
    parts.own[i] = weights[i] == 0 ? 0 : std::max(least, share);
    parts.common -= parts.own[i];
  }
  return parts;
}

class Ledger {
 public:
  Ledger(int64_t all, const TenantWeights& weights)
      : all_(all), parts_(DivideByWeight(all, weights)), held_(weights.size()) {}

  int tenants() const { return static_cast<int>(held_.size()); }
  int64_t all() const { return all_; }
  int64_t held(int tenant) const { return held_[tenant]; }
  int64_t held() const { return held_by_all_; }
  // The tenant's own part, and its maximum while no other tenant holds anything.
  int64_t own(int tenant) const { return parts_.own[tenant]; }
  int64_t most(int tenant) const { return parts_.own[tenant] + parts_.common; }
  // How much of the common rest the tenant holds.
  int64_t Beyond(int tenant) const {
    return std::max<int64_t>(0, held_[tenant] - parts_.own[tenant]);
  }
  // How much more the tenant may take now.
  int64_t Room(int tenant) const {
    const int64_t own = std::max<int64_t>(0, parts_.own[tenant] - held_[tenant]);
    return own + parts_.common - common_held_;
  }
  // The tenant takes `amount`, at most its room; returns it if negative.
  void Add(int tenant, int64_t amount) {
    assert(amount <= Room(tenant));
    const int64_t before = Beyond(tenant);
    held_[tenant] += amount;
    held_by_all_ += amount;
    common_held_ += Beyond(tenant) - before;
    assert(0 <= held_[tenant] && 0 <= common_held_ && common_held_ <= parts_.common);
  }

 private:
  const int64_t all_;
  const TenantParts parts_;
  std::vector<int64_t> held_;  // by tenant
  int64_t held_by_all_ = 0;
  int64_t common_held_ = 0;
};

}  // namespace attend
