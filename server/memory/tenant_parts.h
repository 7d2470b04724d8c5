// SPDX-License-Identifier: Apache-2.0
//
// How memory is divided among tenants, so that none can keep another from all of it: half is
// divided by their weights, and each tenant's part is for it alone. The rest is for whoever comes
// first. One tenant has everything in common with itself.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/util/weight_share.h"

namespace attend {

struct TenantParts {
  std::vector<int64_t> own_bytes;  // by tenant
  int64_t common_bytes = 0;
};

// Each tenant's own part is a multiple of `unit_bytes`.
inline TenantParts DivideByWeight(int64_t bytes, const TenantWeights& weights,
                                  int64_t unit_bytes = 1) {
  TenantParts parts{std::vector<int64_t>(weights.size()), bytes};
  if (weights.size() < 2) return parts;
  for (size_t i = 0; i < weights.size(); ++i) {
    parts.own_bytes[i] = ShareOf(weights, static_cast<int>(i), bytes / 2) / unit_bytes * unit_bytes;
    parts.common_bytes -= parts.own_bytes[i];
  }
  return parts;
}

}  // namespace attend
