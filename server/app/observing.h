// SPDX-License-Identifier: Apache-2.0
//
// Options of the access log and of tracing from the settings, and the metrics of both.

#pragma once

#include <prometheus/metric_family.h>

#include <memory>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/log/access_log.h"
#include "server/log/logging.h"
#include "server/trace/tracer.h"

namespace attend {

AccessLog::Options MakeAccessLogOptions(const Config& config);

// For a non-empty --otlp-endpoint. The arguments must outlive it.
Result<std::unique_ptr<Tracer>> MakeTracer(const Config& config, Logger& logger,
                                           const Clock& clock);

// attend_access_log_lines_total{outcome} and attend_spans_total{outcome}; zeros for null arguments.
// Thread-safe.
std::vector<prometheus::MetricFamily> ObservingFamilies(const AccessLog* log, Tracer* tracer);

}  // namespace attend
