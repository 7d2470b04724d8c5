// SPDX-License-Identifier: Apache-2.0
//
// Metric families whose values are read at each scrape. Thread-safe.

#pragma once

#include <string>
#include <vector>

#include "server/app/dump.h"
#include "server/engine/engine.h"
#include "server/limits/tenant_limits.h"
#include "server/log/logging.h"
#include "server/metrics/make_family.h"
#include "server/metrics/metrics.h"
#include "server/regions/region_registry.h"
#include "server/sessions/session_table.h"
#include "server/upload/staging.h"
#include "server/util/reload_hooks.h"

namespace attend {

// Sets the gauges that are not updated as their values change, except those of connections.
void RefreshGauges(Engine& engine, Metrics& metrics, Logger& logger);

// attend_shared_memory_bytes{state}, _limit_bytes, _regions, _clients, _regions_created_total and
// _regions_refused_total, attend_cuda_ipc_bytes and _regions; zeros if `registry` is null.
MetricFamilies SharedMemoryFamilies(const RegionRegistry* registry);

// Disk writes: attend_check_dumps_total{result}, attend_log_write_errors_total. `dumper` null:
// dumps are off.
MetricFamilies DiskFamilies(const Dumper* dumper, const Logger& logger);

// attend_staged_uploads_total{end}, attend_staged_bytes_total, attend_staging_memory_bytes{device}
// and attend_staging_memory_limit_bytes{device}.
MetricFamilies StagingFamilies(const StagingBudget& budget);

// attend_reloads_total{what,result}.
MetricFamilies ReloadFamilies(const ReloadHooks& reloads);

// attend_tenant_limit, attend_tenant_used and attend_tenant_limited_total, {tenant,limit}.
MetricFamilies LimitFamilies(const TenantLimits& limits, const Tenants& tenants);

// attend_sessions, attend_sessions_created_total, _expired_total, _evictions_total,
// _evicted_bytes_total, _evicted_idle_seconds, attend_session_appended_tokens_total{tenant},
// attend_session_memory_bytes{device,state} and attend_session_tenant_bytes{device,tenant}; zeros
// if `table` is null. `devices`: the names of the table's devices.
MetricFamilies SessionFamilies(const SessionTable* table, const std::vector<std::string>& devices,
                               const Tenants& tenants);

}  // namespace attend
