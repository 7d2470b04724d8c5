// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/tenants.h"

#include <algorithm>
#include <utility>

#include "server/util/parse_number.h"

namespace attend {
namespace {

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_' || c == '.';
}

}  // namespace

Result<Tenant> ParseTenant(std::string_view text) {
  const std::string quoted = "\"" + std::string(text) + "\"";
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) {
    return InvalidArgument("tenant " + quoted + " must be NAME=WEIGHT");
  }
  Tenant tenant;
  tenant.name = text.substr(0, equals);
  if (tenant.name.empty() || tenant.name.size() > kTenantNameBytesMax ||
      !std::all_of(tenant.name.begin(), tenant.name.end(), IsNameCharacter)) {
    return InvalidArgument("tenant " + quoted + ": the name must be 1 to " +
                           std::to_string(kTenantNameBytesMax) +
                           " letters, digits, dots, dashes and underscores");
  }
  tenant.weight = ParseNumber<int32_t>(text.substr(equals + 1)).value_or(0);
  if (tenant.weight < 1 || tenant.weight > kTenantWeightMax) {
    return InvalidArgument("tenant " + quoted + ": the weight must be a whole number in [1, " +
                           std::to_string(kTenantWeightMax) + "]");
  }
  return tenant;
}

Tenants::Tenants() : list_{{kDefaultTenant, 1}}, by_name_{{kDefaultTenant, 0}} {}

Result<Tenants> Tenants::Parse(const std::vector<std::string>& settings) {
  Tenants tenants;
  for (const std::string& text : settings) {
    Result<Tenant> tenant = ParseTenant(text);
    if (!tenant.ok()) return tenant.status();
    if (tenant->name == kDefaultTenant && !std::exchange(tenants.default_given_, true)) {
      tenants.list_.front().weight = tenant->weight;
      continue;
    }
    const int index = static_cast<int>(tenants.list_.size());
    if (!tenants.by_name_.emplace(tenant->name, index).second) {
      return InvalidArgument("tenant \"" + tenant->name + "\" is given twice");
    }
    if (index == kTenantsMax) {
      return InvalidArgument("tenant \"" + tenant->name + "\" exceeds the limit of " +
                             std::to_string(kTenantsMax) + " tenants, " + kDefaultTenant +
                             " included");
    }
    tenants.list_.push_back(std::move(*tenant));
  }
  return tenants;
}

Tenants Tenants::ForKnownCallers() const {
  Tenants tenants = *this;
  if (!default_given_ && !single()) tenants.list_.front().weight = 0;
  return tenants;
}

int Tenants::Find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? 0 : found->second;
}

TenantWeights Tenants::weights() const {
  std::vector<int32_t> weights;
  for (const Tenant& tenant : list_) weights.push_back(tenant.weight);
  return TenantWeights(std::move(weights));
}

}  // namespace attend
