// SPDX-License-Identifier: Apache-2.0
//
// Helpers to make the families of Metrics and its parts.

#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <cstdint>

namespace attend {

inline prometheus::Family<prometheus::Gauge>& MakeGauge(prometheus::Registry& registry,
                                                        const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
inline prometheus::Family<prometheus::Counter>& MakeCounter(prometheus::Registry& registry,
                                                            const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
inline prometheus::Family<prometheus::Histogram>& MakeHistogram(prometheus::Registry& registry,
                                                                const char* name,
                                                                const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

inline double Seconds(int64_t nanoseconds) {
  return static_cast<double>(std::max<int64_t>(0, nanoseconds)) * 1e-9;
}

}  // namespace attend
