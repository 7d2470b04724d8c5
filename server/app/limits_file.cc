// SPDX-License-Identifier: Apache-2.0

#include "server/app/limits_file.h"

#include "server/util/whole_file.h"

namespace attend {

Result<std::vector<TenantBounds>> ReadLimits(const std::string& path, const Tenants& tenants) {
  const Result<std::string> text = ReadWholeFile(path, kLimitsBytesMax);
  if (!text.ok()) return InvalidArgument(text.status().message());
  std::vector<std::string> names;
  for (const Tenant& tenant : tenants.list()) names.push_back(tenant.name);
  Result<std::vector<TenantBounds>> bounds = ParseLimits(*text, names);
  if (!bounds.ok()) return InvalidArgument(path + ": " + bounds.status().message());
  return bounds;
}

}  // namespace attend
