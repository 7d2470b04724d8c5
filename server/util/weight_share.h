// SPDX-License-Identifier: Apache-2.0
//
// What of something is a tenant's by its weight.

#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace attend {

// Rounded down, so that all shares fit.
inline int64_t ShareOf(const std::vector<int32_t>& weights, int tenant, int64_t all) {
  const auto sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  return static_cast<int64_t>(static_cast<__int128>(all) * weights[tenant] / sum);
}

}  // namespace attend
