// SPDX-License-Identifier: Apache-2.0
//
// The part of Metrics with a label `tenant` alone: the series of one tenant. Recording is
// thread-safe.

#pragma once

#include <cstdint>
#include <string>

#include "server/metrics/code_counters.h"
#include "server/metrics/make_family.h"
#include "server/request/request.h"

namespace attend {

// Whether it ended because of a limit of its tenant's.
bool LimitedByTenant(const Request& request);

class TenantSeries {
 public:
  TenantSeries(prometheus::Registry& registry, const std::string& name);

  void RecordFinished(const Request& request, int64_t total_ns) const;
  void RecordSmallCall(Code code) const { small_calls_.Count(code); }

 private:
  CodeCounters requests_;
  CodeCounters small_calls_;
  prometheus::Counter& limited_;
  prometheus::Counter& flops_;
  prometheus::Counter& session_rows_;
  prometheus::Histogram& duration_;
};

}  // namespace attend
