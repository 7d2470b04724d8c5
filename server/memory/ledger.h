// SPDX-License-Identifier: Apache-2.0
//
// Which tenant may hold how much of something that all share. Half of it is divided by their
// weights: each tenant's own part, of which no weight is too small for one unit. The rest is
// common, for the tenant that comes first. One tenant has everything in common with itself, and so
// has one beside others whose weights are 0.
//
// Invariant: what tenants hold beyond their own parts never exceeds the common rest. So a tenant's
// own part is free for it, however much the others hold and for however long, and nothing that is
// in use ever has to be taken back. What is idle may be: a tenant's own, or another's that is
// beyond that one's part (Beyond).
//
// Every call is O(1). Not thread-safe: the ledger of pages, and those of sessions and their tables,
// are under the session table's lock, that of regions under their registry's, that of uploads under
// UploadBudget's. Tensor memory is divided alike, by place (host_pool.h).

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

// Each tenant's own part is a multiple of `unit`: at least one, if its weight is not 0 and there
// are two for each tenant.
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
  // The tenant's own part, and the most that it can hold while no other holds anything.
  int64_t own(int tenant) const { return parts_.own[tenant]; }
  int64_t most(int tenant) const { return parts_.own[tenant] + parts_.common; }
  // How much the tenant holds of the common rest.
  int64_t Beyond(int tenant) const {
    return std::max<int64_t>(0, held_[tenant] - parts_.own[tenant]);
  }
  // How much more the tenant may hold now.
  int64_t Room(int tenant) const {
    const int64_t own = std::max<int64_t>(0, parts_.own[tenant] - held_[tenant]);
    return own + parts_.common - common_held_;
  }
  // The tenant holds `amount` more, at most its room; less, if that is negative.
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
