// SPDX-License-Identifier: Apache-2.0

#include "server/staging_stats.h"

#include <utility>

namespace attend {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

ClientMetric& Add(MetricFamily& family, const char* label, const std::string& value) {
  ClientMetric& metric = family.metric.emplace_back();
  metric.label.push_back({label, value});
  return metric;
}

}  // namespace

std::vector<MetricFamily> StagingStats::Collect() const {
  MetricFamily ends{"attend_staged_uploads_total",
                    "Uploads large enough to go to a device while they arrived, by what became of "
                    "that",
                    MetricType::Counter,
                    {}};
  for (int i = 0; i < kStagingEndCount; ++i) {
    const auto end = static_cast<StagingEnd>(i);
    Add(ends, "end", StagingEndName(end)).counter.value = static_cast<double>(budget_.ends(end));
  }
  MetricFamily bytes{"attend_staged_bytes_total",
                     "Bytes that went to a device while their upload arrived",
                     MetricType::Counter,
                     {}};
  bytes.metric.emplace_back().counter.value = static_cast<double>(budget_.copied_bytes());
  MetricFamily parts{"attend_staged_parts_total",
                     "Parts of requests that were queued while the rest of their upload arrived",
                     MetricType::Counter,
                     {}};
  parts.metric.emplace_back().counter.value = static_cast<double>(budget_.parts());
  MetricFamily held{
      "attend_staging_memory_bytes", "Device memory that holds uploads", MetricType::Gauge, {}};
  MetricFamily limit{"attend_staging_memory_limit_bytes",
                     "Bound of device memory for uploads",
                     MetricType::Gauge,
                     {}};
  for (int i = 0; i < budget_.devices(); ++i) {
    const auto& [device, bytes_max] = budget_.limit(i);
    Add(held, "device", device).gauge.value = static_cast<double>(budget_.held_bytes(i));
    Add(limit, "device", device).gauge.value = static_cast<double>(bytes_max);
  }
  return {std::move(ends), std::move(bytes), std::move(parts), std::move(held), std::move(limit)};
}

}  // namespace attend
