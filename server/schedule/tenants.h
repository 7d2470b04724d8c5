// SPDX-License-Identifier: Apache-2.0
//
// The tenants that share the server, and their weights. Callers name their tenant in the call's
// metadata. Only configured names count, so an unknown name adds no tenant, metric or memory.
// Immutable once made, hence thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/status.h"
#include "server/util/weight_share.h"

namespace attend {

inline constexpr char kTenantMetadataKey[] = "x-attend-tenant";
inline constexpr char kDefaultTenant[] = "default";
inline constexpr int kTenantsMax = 64;
inline constexpr int kTenantNameBytesMax = 64;
inline constexpr int32_t kTenantWeightMax = 1000;

struct Tenant {
  std::string name;
  int32_t weight = 1;  // in [1, kTenantWeightMax]; 0: see ForKnownCallers
};

// Parses "NAME=WEIGHT". INVALID_ARGUMENT says which part is wrong.
Result<Tenant> ParseTenant(std::string_view text);

class Tenants {
 public:
  Tenants();  // only "default", with weight 1

  // Each setting is "NAME=WEIGHT"; names must be unique. "default" is added with weight 1 unless
  // given.
  static Result<Tenants> Parse(const std::vector<std::string>& settings);

  // For a server on which every caller is known, so that no one is "default" for lack of a name.
  // Unless "default" was configured or is the only tenant, its weight becomes 0: it has no
  // guaranteed share of any resource, and weight 1 in the queue.
  Tenants ForKnownCallers() const;

  // The index of the tenant with this name; 0 ("default") if there is none.
  int Find(std::string_view name) const;
  // True if all callers are one tenant, whatever name they send.
  bool single() const { return list_.size() == 1; }
  const std::vector<Tenant>& list() const { return list_; }
  TenantWeights weights() const;

 private:
  std::vector<Tenant> list_;  // "default" first
  bool default_given_ = false;
  std::map<std::string, int, std::less<>> by_name_;
};

}  // namespace attend
