// SPDX-License-Identifier: Apache-2.0
//
// Reads the file of --limits, at the start and on SIGHUP.

#pragma once

#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/limits/tenant_bounds.h"
#include "server/schedule/tenants.h"

namespace attend {

// The bounds of each tenant. INVALID_ARGUMENT names the file and the fault.
Result<std::vector<TenantBounds>> ReadLimits(const std::string& path, const Tenants& tenants);

}  // namespace attend
