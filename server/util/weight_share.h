// SPDX-License-Identifier: Apache-2.0
//
// A tenant's weighted share of a total.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <utility>
#include <vector>

namespace attend {

// The weight of each tenant, by index. There is no default, so that options that omit the weights
// do not compile: otherwise everything would silently belong to the first tenant.
struct TenantWeights : std::vector<int32_t> {
  TenantWeights() = delete;
  TenantWeights(std::initializer_list<int32_t> weights) : vector(weights) {}
  explicit TenantWeights(std::vector<int32_t> weights) : vector(std::move(weights)) {}
};

// Rounded down, so that the shares never exceed the total.
inline int64_t ShareOf(const TenantWeights& weights, int tenant, int64_t all) {
  const auto sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  return static_cast<int64_t>(static_cast<__int128>(all) * weights[tenant] / sum);
}

}  // namespace attend
