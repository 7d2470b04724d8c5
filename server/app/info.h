// SPDX-License-Identifier: Apache-2.0
//
// Fills GetServerInfo's answer. Pure, apart from the engine's current state.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/clock.h"
#include "server/app/config.h"
#include "server/engine/engine.h"
#include "server/limits/tenant_limits.h"
#include "server/regions/shared_memory_server.h"
#include "server/sessions/session_table.h"

namespace attend {

// The tenant's limits and their use. `sessions` is null if sessions are off.
void FillTenant(const Engine& engine, const TenantLimits& limits, int tenant,
                const SessionTable* sessions, v1::TenantInfo* info);

// `shared` and `sessions` are null if these are off.
void FillServerInfo(const Engine& engine, const Config& config, const SharedMemoryServer* shared,
                    const SessionTable* sessions, Duration uptime,
                    v1::GetServerInfoResponse* response);

}  // namespace attend
