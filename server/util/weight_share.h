// SPDX-License-Identifier: Apache-2.0
//
// What of something is a tenant's by its weight.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <utility>
#include <vector>

namespace attend {

// The weight of every tenant, by its index. There is no default: options that leave it out do not
// compile, as everything would else be the first tenant's, and nobody would notice.
struct TenantWeights : std::vector<int32_t> {
  TenantWeights() = delete;
  TenantWeights(std::initializer_list<int32_t> weights) : vector(weights) {}
  explicit TenantWeights(std::vector<int32_t> weights) : vector(std::move(weights)) {}
};

// Rounded down, so that all shares fit.
inline int64_t ShareOf(const TenantWeights& weights, int tenant, int64_t all) {
  const auto sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  return static_cast<int64_t>(static_cast<__int128>(all) * weights[tenant] / sum);
}

}  // namespace attend
