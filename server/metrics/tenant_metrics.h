// SPDX-License-Identifier: Apache-2.0
//
// The series of one tenant: the part of Metrics with the label `tenant` alone. Recording is
// thread-safe.

#pragma once

#include <cstdint>
#include <string>

#include "server/metrics/code_counters.h"
#include "server/metrics/make_family.h"
#include "server/request/request.h"

namespace attend {

// Whether a limit of its tenant refused the request.
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
