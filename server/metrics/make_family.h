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
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// Families built at each scrape.
using MetricFamilies = std::vector<prometheus::MetricFamily>;
inline constexpr auto kGauges = prometheus::MetricType::Gauge;
inline constexpr auto kCounters = prometheus::MetricType::Counter;

inline prometheus::MetricFamily EmptyFamily(prometheus::MetricType type, const char* name,
                                            const char* help) {
  return {name, help, type, {}};
}
// Adds a counter or a gauge.
template <class Number>
void AddMetric(prometheus::MetricFamily& family,
               std::vector<prometheus::ClientMetric::Label> labels, Number value) {
  prometheus::ClientMetric& metric = family.metric.emplace_back();
  metric.label = std::move(labels);
  (family.type == kCounters ? metric.counter.value : metric.gauge.value) =
      static_cast<double>(value);
}
// A family of one metric without labels.
template <class Number>
prometheus::MetricFamily FamilyOf(prometheus::MetricType type, const char* name, const char* help,
                                  Number value) {
  prometheus::MetricFamily family = EmptyFamily(type, name, help);
  AddMetric(family, {}, value);
  return family;
}
// A family with one label.
inline prometheus::MetricFamily FamilyBy(
    prometheus::MetricType type, const char* name, const char* help, const char* label,
    std::initializer_list<std::pair<const char*, int64_t>> values) {
  prometheus::MetricFamily family = EmptyFamily(type, name, help);
  for (const auto& [which, value] : values) AddMetric(family, {{label, which}}, value);
  return family;
}

inline double Seconds(int64_t nanoseconds) {
  return static_cast<double>(std::max<int64_t>(0, nanoseconds)) * 1e-9;
}

}  // namespace attend
