// SPDX-License-Identifier: Apache-2.0
//
// Collectors of values that are read at each scrape instead of being counted as they change.
// Thread-safe. Constructor arguments must outlive them.

#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/app/dump.h"
#include "server/engine/engine.h"
#include "server/limits/tenant_limits.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/regions/region_registry.h"
#include "server/sessions/session_table.h"
#include "server/upload/staging.h"
#include "server/util/reload_hooks.h"

namespace attend {

// Sets the gauges that are not set when their values change. Returns no families of its own.
class GaugeRefresh final : public prometheus::Collectable {
 public:
  // `connections` sets the gauges of connections.
  GaugeRefresh(Engine& engine, Metrics& metrics, Logger& logger, std::function<void()> connections)
      : engine_(engine), metrics_(metrics), logger_(logger), connections_(std::move(connections)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  Engine& engine_;
  Metrics& metrics_;
  Logger& logger_;
  const std::function<void()> connections_;
};

// attend_shared_memory_bytes{state}, _limit_bytes, _regions, _clients, _regions_created_total and
// _regions_refused_total, attend_cuda_ipc_bytes and _regions; zeros without a registry.
class SharedMemoryStats final : public prometheus::Collectable {
 public:
  // Null: shared memory is off.
  explicit SharedMemoryStats(const RegionRegistry* registry) : registry_(registry) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const RegionRegistry* const registry_;
};

// Writes to disks: attend_check_dumps_total{result}, attend_log_write_errors_total.
class DiskStats final : public prometheus::Collectable {
 public:
  // Null: dumps are off.
  DiskStats(const Dumper* dumper, const Logger& logger) : dumper_(dumper), logger_(logger) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const Dumper* const dumper_;
  const Logger& logger_;
};

// attend_staged_uploads_total{end}, attend_staged_bytes_total, attend_staging_memory_bytes{device}
// and attend_staging_memory_limit_bytes{device}.
class StagingStats final : public prometheus::Collectable {
 public:
  explicit StagingStats(const StagingBudget& budget) : budget_(budget) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const StagingBudget& budget_;
};

// attend_reloads_total{what,result}.
class ReloadStats final : public prometheus::Collectable {
 public:
  explicit ReloadStats(const ReloadHooks& reloads) : reloads_(reloads) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const ReloadHooks& reloads_;
};

// attend_tenant_limit, attend_tenant_used and attend_tenant_limited_total, {tenant,limit}.
class LimitStats final : public prometheus::Collectable {
 public:
  LimitStats(const TenantLimits& limits, const Tenants& tenants)
      : limits_(limits), tenants_(tenants) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const TenantLimits& limits_;
  const Tenants tenants_;
};

// attend_sessions, attend_sessions_created_total, _expired_total,
// _evictions_total, _evicted_bytes_total, _evicted_idle_seconds,
// attend_session_appended_tokens_total{tenant}, attend_session_memory_bytes{device,state} and
// attend_session_tenant_bytes{device,tenant}; zeros without a table.
class SessionStats final : public prometheus::Collectable {
 public:
  // Null: sessions are off. `devices` are the names of the table's.
  SessionStats(const SessionTable* table, std::vector<std::string> devices, const Tenants& tenants)
      : table_(table), devices_(std::move(devices)), tenants_(tenants) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  prometheus::MetricFamily TenantBytes() const;

  const SessionTable* const table_;
  const std::vector<std::string> devices_;
  const Tenants tenants_;
};

}  // namespace attend
