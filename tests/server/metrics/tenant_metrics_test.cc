// SPDX-License-Identifier: Apache-2.0
//
// Requests by tenant, and requests refused by the tenant's own limit: alerts on errors subtract the
// latter, so they must be counted as requests too.

#include "server/metrics/tenant_metrics.h"

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <string>

#include "server/metrics/metrics.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

// The family's sum for tenant a, if it is per tenant, and for `code`; for all codes without one.
double Value(const Metrics& metrics, const std::string& family, const std::string& code = "") {
  double sum = 0;
  for (const prometheus::MetricFamily& each : metrics.registry()->Collect()) {
    if (each.name != family) continue;
    for (const prometheus::ClientMetric& metric : each.metric) {
      bool wanted = code.empty(), others = false;
      for (const auto& [name, value] : metric.label) {
        wanted |= name == "code" && value == code;
        others |= name == "tenant" && value != "a";
      }
      if (wanted && !others) sum += metric.counter.value;
    }
  }
  return sum;
}

void Finish(Metrics& metrics, Code code, bool tenant_limit) {
  Request request;
  request.tenant = 1;
  if (code != Code::kOk) request.status = Status(code, "");
  if (tenant_limit) request.status = Because(Rejection::kTenantLimit, request.status);
  metrics.RecordFinished(request, 1, 0);
}

class TenantMetricsTest : public testing::Test {
 protected:
  TenantMetricsTest() { metrics_.AddDevices({{"cpu", 2}}, {{"default", 1}, {"a", 1}}); }
  Metrics metrics_{"1.2.3"};
};

TEST_F(TenantMetricsTest, OnlyARequestRefusedByItsTenantsLimitCountsAsLimited) {
  const char* const limited = "attend_tenant_limited_requests_total";
  Finish(metrics_, Code::kResourceExhausted, true);
  EXPECT_EQ(Value(metrics_, limited), 1);
  Finish(metrics_, Code::kResourceExhausted, false);  // no memory
  Finish(metrics_, Code::kCancelled, false);          // its client did not wait for the refusal
  Finish(metrics_, Code::kOk, false);
  EXPECT_EQ(Value(metrics_, limited), 1);
  EXPECT_EQ(Value(metrics_, "attend_tenant_requests_total", "RESOURCE_EXHAUSTED"), 2);
  EXPECT_EQ(Value(metrics_, "attend_tenant_requests_total"), 4);
  EXPECT_EQ(Value(metrics_, "attend_objective_requests_total", "RESOURCE_EXHAUSTED"), 1);
  EXPECT_EQ(Value(metrics_, "attend_objective_requests_total"), 3);
}

TEST_F(TenantMetricsTest, SmallCallsDoNotCountAsRequests) {
  metrics_.RecordSmallCall(1, Code::kResourceExhausted);
  metrics_.RecordRejection(Rejection::kTenantLimit);
  metrics_.RecordSmallCall(1, Code::kOk);
  metrics_.RecordSmallCall(0, Code::kOk);  // of another tenant
  EXPECT_EQ(Value(metrics_, "attend_tenant_small_calls_total"), 2);
  EXPECT_EQ(Value(metrics_, "attend_tenant_small_calls_total", "RESOURCE_EXHAUSTED"), 1);
  EXPECT_EQ(Value(metrics_, "attend_tenant_limited_requests_total"), 0);
  EXPECT_EQ(Value(metrics_, "attend_tenant_requests_total"), 0);
}

}  // namespace
}  // namespace attend
