// SPDX-License-Identifier: Apache-2.0
//
// Helpers that make series. A registry makes a family with its first series.

#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace attend {

inline prometheus::Gauge& MakeGauge(prometheus::Registry& registry, const char* name,
                                    const char* help, const prometheus::Labels& labels = {}) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
}
// One gauge per reloadable file: 1 while the last reload failed.
inline prometheus::Family<prometheus::Gauge>& ReloadFailedFamily(prometheus::Registry& registry) {
  return prometheus::BuildGauge()
      .Name("attend_reload_failed")
      .Help("1 while a changed file could not be loaded and the previous one stays in use")
      .Register(registry);
}
inline prometheus::Counter& MakeCounter(prometheus::Registry& registry, const char* name,
                                        const char* help, const prometheus::Labels& labels = {}) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add(labels);
}
inline prometheus::Histogram& MakeHistogram(prometheus::Registry& registry, const char* name,
                                            const char* help,
                                            const prometheus::Histogram::BucketBoundaries& buckets,
                                            const prometheus::Labels& labels = {}) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(labels, buckets);
}

// One counter per value of `label`; all have `labels` too.
template <size_t kCount>
std::array<prometheus::Counter*, kCount> MakeCounters(
    prometheus::Registry& registry, const char* name, const char* help, const char* label,
    const std::array<std::string_view, kCount>& values, prometheus::Labels labels = {}) {
  std::array<prometheus::Counter*, kCount> counters;
  for (size_t i = 0; i < kCount; ++i) {
    labels[label] = std::string(values[i]);
    counters[i] = &MakeCounter(registry, name, help, labels);
  }
  return counters;
}

// A family built at each scrape, and its metrics with one label.
inline prometheus::MetricFamily EmptyFamily(prometheus::MetricType type, const char* name,
                                            const char* help) {
  return {name, help, type, {}};
}
inline prometheus::ClientMetric& AddMetric(prometheus::MetricFamily& family, const char* label,
                                           const std::string& value) {
  prometheus::ClientMetric& metric = family.metric.emplace_back();
  metric.label.push_back({label, value});
  return metric;
}

inline double Seconds(int64_t nanoseconds) {
  return static_cast<double>(std::max<int64_t>(0, nanoseconds)) * 1e-9;
}

}  // namespace attend
