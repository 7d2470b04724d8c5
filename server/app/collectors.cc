// SPDX-License-Identifier: Apache-2.0

#include "server/app/collectors.h"

#include <cstdint>
#include <limits>

#include "server/metrics/make_family.h"

namespace attend {
namespace {

using prometheus::MetricFamily;

MetricFamily IdleFamily(const SessionTable::Stats& stats) {
  MetricFamily family =
      EmptyFamily(prometheus::MetricType::Histogram, "attend_sessions_evicted_idle_seconds",
                  "Idle time of sessions whose tokens were evicted because memory was short");
  auto& histogram = family.metric.emplace_back().histogram;
  histogram.sample_sum = stats.evicted_idle_seconds;
  const auto& bounds = EvictionStats::kIdleBoundsSeconds;
  for (size_t n = 0; n < stats.evictions_by_idle.size(); ++n) {
    histogram.sample_count += static_cast<uint64_t>(stats.evictions_by_idle[n]);
    const double bound = n < bounds.size() ? bounds[n] : std::numeric_limits<double>::infinity();
    histogram.bucket.push_back({histogram.sample_count, bound});
  }
  return family;
}

MetricFamily TenantBytesFamily(const SessionTable* table, const std::vector<std::string>& devices,
                               const Tenants& tenants) {
  MetricFamily family =
      EmptyFamily(kGauges, "attend_session_tenant_bytes",
                  "Session memory in use, by the tenant that created the sessions");
  for (size_t n = 0; n < devices.size(); ++n) {
    std::vector<int64_t> bytes(tenants.list().size());
    if (table != nullptr) bytes = table->tenant_bytes(static_cast<int>(n));
    for (size_t t = 0; t < bytes.size(); ++t) {
      AddMetric(family, {{"device", devices[n]}, {"tenant", tenants.list()[t].name}}, bytes[t]);
    }
  }
  return family;
}

}  // namespace

void RefreshGauges(Engine& engine, Metrics& metrics, Logger& logger) {
  HostPool& pool = engine.host_pool();
  metrics.SetHostMemory(pool.used_bytes(), pool.largest_free_bytes(), pool.budget_bytes());
  // Also set on every change, but two concurrent changes may set it in the wrong order.
  metrics.SetInflight(engine.inflight());
  const std::vector<Engine::DeviceState> devices = engine.Devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    metrics.SetOutstanding(static_cast<int>(i), devices[i].outstanding_batches);
    metrics.SetDeviceMemory(static_cast<int>(i), devices[i].memory);
  }
  metrics.RecordLogLinesSuppressed(logger.TakeLeftOutCount());
}

MetricFamilies SharedMemoryFamilies(const RegionRegistry* registry) {
  RegionRegistry::Stats stats;
  if (registry != nullptr) stats = registry->stats();
  return {FamilyBy(kGauges, "attend_shared_memory_bytes",
                   "Shared memory of regions that clients hold (open), and of regions being "
                   "created, or released but still in use (changing)",
                   "state", {{"open", stats.bytes}, {"changing", stats.changing_bytes}}),
          FamilyOf(kGauges, "attend_shared_memory_limit_bytes", "Limit on shared memory; 0: off",
                   registry == nullptr ? 0 : registry->limits().bytes_max),
          FamilyOf(kGauges, "attend_shared_memory_regions", "Shared regions that clients hold",
                   stats.regions),
          FamilyOf(kGauges, "attend_shared_memory_clients",
                   "Connections to the shared-memory socket", stats.clients),
          FamilyOf(kCounters, "attend_shared_memory_regions_created_total",
                   "Shared regions created", stats.created),
          FamilyOf(kCounters, "attend_shared_memory_regions_refused_total",
                   "Requests for a shared region that were refused", stats.refused),
          FamilyOf(kGauges, "attend_cuda_ipc_regions", "GPU memory regions that clients lend",
                   stats.lent_regions),
          FamilyOf(kGauges, "attend_cuda_ipc_bytes", "Bytes of GPU memory that clients lend",
                   stats.lent_bytes)};
}

MetricFamilies DiskFamilies(const Dumper* dumper, const Logger& logger) {
  static const Dumper::Counts kNone;
  const Dumper::Counts& counts = dumper == nullptr ? kNone : dumper->counts();
  return {
      FamilyBy(
          kCounters, "attend_check_dumps_total",
          "Requests whose check failed: written to --check-dump-dir, left out by its "
          "limits, or failed to be written",
          "result",
          {{"written", counts.written}, {"left_out", counts.left_out}, {"failed", counts.failed}}),
      FamilyOf(kCounters, "attend_log_write_errors_total",
               "Log lines lost to a full disk or a slow reader", logger.lost_lines())};
}

MetricFamilies StagingFamilies(const StagingBudget& budget) {
  MetricFamily ends =
      EmptyFamily(kCounters, "attend_staged_uploads_total",
                  "Uploads large enough to be copied to a device while they arrive, by outcome");
  for (int i = 0; i < kStagingEndCount; ++i) {
    const auto end = static_cast<StagingEnd>(i);
    AddMetric(ends, {{"end", StagingEndName(end)}}, budget.ends(end));
  }
  MetricFamily held =
      EmptyFamily(kGauges, "attend_staging_memory_bytes", "Device memory that holds uploads");
  MetricFamily limit = EmptyFamily(kGauges, "attend_staging_memory_limit_bytes",
                                   "Limit on device memory for uploads");
  for (int i = 0; i < budget.devices(); ++i) {
    const auto& [device, bytes_max] = budget.limit(i);
    AddMetric(held, {{"device", device}}, budget.held_bytes(i));
    AddMetric(limit, {{"device", device}}, bytes_max);
  }
  return {std::move(ends),
          FamilyOf(kCounters, "attend_staged_bytes_total",
                   "Bytes copied to a device while their upload was still arriving",
                   budget.copied_bytes()),
          std::move(held), std::move(limit)};
}

MetricFamilies ReloadFamilies(const ReloadHooks& reloads) {
  MetricFamily family = EmptyFamily(kCounters, "attend_reloads_total",
                                    "Reloads on SIGHUP, by what was reloaded and by result");
  for (const ReloadHooks::Count& each : reloads.counts()) {
    AddMetric(family, {{"what", each.what}, {"result", "ok"}}, each.done);
    AddMetric(family, {{"what", each.what}, {"result", "failed"}}, each.failed);
  }
  return {std::move(family)};
}

MetricFamilies LimitFamilies(const TenantLimits& limits, const Tenants& tenants) {
  MetricFamily most =
      EmptyFamily(kGauges, "attend_tenant_limit", "A tenant's limit; for a rate, its burst");
  MetricFamily used =
      EmptyFamily(kGauges, "attend_tenant_used",
                  "How much of a limit a tenant uses; for a rate, how much of its burst is spent");
  MetricFamily limited =
      EmptyFamily(kCounters, "attend_tenant_limited_total", "Refusals of a tenant, by limit");
  for (int tenant = 0; tenant < limits.tenants(); ++tenant) {
    for (const Limit limit : kLimits) {
      const TenantLimits::Use use = limits.use(tenant, limit);
      const std::vector<prometheus::ClientMetric::Label> labels = {
          {"tenant", tenants.list()[tenant].name}, {"limit", std::string(LimitLabel(limit))}};
      const bool bounded = use.most != kUnlimited;
      AddMetric(most, labels,
                bounded ? static_cast<double>(use.most) : std::numeric_limits<double>::infinity());
      AddMetric(used, labels, use.used);
      AddMetric(limited, labels, use.refused);
    }
  }
  return {std::move(most), std::move(used), std::move(limited)};
}

MetricFamilies SessionFamilies(const SessionTable* table, const std::vector<std::string>& devices,
                               const Tenants& tenants) {
  SessionTable::Stats stats;
  if (table != nullptr) stats = table->stats();
  MetricFamily memory = EmptyFamily(kGauges, "attend_session_memory_bytes",
                                    "Session memory: used (pages that hold tokens), shared (used "
                                    "by several sessions), free, and the limit");
  for (size_t n = 0; n < devices.size(); ++n) {
    PageTree::Stats pool;
    if (table != nullptr) pool = table->memory(static_cast<int>(n));
    for (const auto& [state, bytes] :
         {std::pair{"used", pool.used_bytes}, std::pair{"shared", pool.shared_bytes},
          std::pair{"free", pool.total_bytes - pool.used_bytes},
          std::pair{"limit", pool.total_bytes}}) {
      AddMetric(memory, {{"device", devices[n]}, {"state", state}}, bytes);
    }
  }
  MetricFamily appended = EmptyFamily(kCounters, "attend_session_appended_tokens_total",
                                      "Tokens appended to sessions, counted once per layer, by the "
                                      "tenant that created the sessions");
  stats.appended_tokens.resize(tenants.list().size());
  for (size_t t = 0; t < stats.appended_tokens.size(); ++t) {
    AddMetric(appended, {{"tenant", tenants.list()[t].name}}, stats.appended_tokens[t]);
  }
  return {
      FamilyOf(kGauges, "attend_sessions", "Sessions that exist", stats.sessions),
      FamilyOf(kCounters, "attend_sessions_created_total", "Sessions created, including forks",
               stats.created),
      FamilyOf(kCounters, "attend_sessions_expired_total", "Sessions whose lease ended",
               stats.expired),
      FamilyBy(kCounters, "attend_sessions_evictions_total",
               "Evictions of a session's tokens: for its own tenant (own), for others where its "
               "tenant exceeded its share (share), or by an operator",
               "cause",
               {{"own", stats.evictions_own},
                {"share", stats.evictions_others},
                {"operator", stats.evictions_operator}}),
      FamilyOf(kCounters, "attend_sessions_evicted_bytes_total", "Bytes of evicted pages",
               stats.evicted_bytes),
      IdleFamily(stats),
      std::move(appended),
      std::move(memory),
      TenantBytesFamily(table, devices, tenants)};
}

}  // namespace attend
