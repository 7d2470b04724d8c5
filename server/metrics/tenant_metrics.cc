// SPDX-License-Identifier: Apache-2.0

#include "server/metrics/tenant_metrics.h"

#include "server/util/rejection.h"

namespace attend {
namespace {

// Few, as there is a set per tenant; a subset of attend_phase_duration_seconds' bounds.
prometheus::Histogram::BucketBoundaries Buckets() { return {1e-3, 1e-2, 0.1, 0.5, 1, 2.5, 10, 60}; }

}  // namespace

bool LimitedByTenant(const Request& request) {
  return RejectionOf(request.status) == Rejection::kTenantLimit;
}

TenantSeries::TenantSeries(prometheus::Registry& registry, const std::string& name)
    : requests_(registry, "attend_tenant_requests_total",
                "Requests that ended, by tenant and gRPC status code", {{"tenant", name}}),
      small_calls_(registry, "attend_tenant_small_calls_total",
                   "Calls other than requests that ended, by tenant and gRPC status code",
                   {{"tenant", name}}),
      limited_(MakeCounter(
          registry, "attend_tenant_limited_requests_total",
          "Requests that ended with RESOURCE_EXHAUSTED because of a tenant limit, by tenant",
          {{"tenant", name}})),
      flops_(MakeCounter(registry, "attend_tenant_flops_total",
                         "Floating-point operations of answered requests, by tenant",
                         {{"tenant", name}})),
      session_rows_(MakeCounter(registry, "attend_session_query_rows_total",
                                "Query rows computed over sessions, by tenant; these are decoded "
                                "tokens if each step has one row",
                                {{"tenant", name}})),
      duration_(MakeHistogram(registry, "attend_tenant_request_duration_seconds",
                              "Time from the arrival of answered requests to their answers, by "
                              "tenant",
                              Buckets(), {{"tenant", name}})) {}

void TenantSeries::RecordFinished(const Request& request, int64_t total_ns) const {
  requests_.Count(request.status.code());
  if (LimitedByTenant(request)) limited_.Increment();
  if (!request.status.ok()) return;
  duration_.Observe(Seconds(total_ns));
  flops_.Increment(request.flops);
  if (request.source.cache() == nullptr) return;
  const Problem& p = request.attention.problem;
  session_rows_.Increment(static_cast<double>(p.batch * p.len_q));
}

}  // namespace attend
