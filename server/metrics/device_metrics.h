// SPDX-License-Identifier: Apache-2.0
//
// The series of one device: the part of Metrics with the label `device`. Recording is thread-safe.

#pragma once

#include <array>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/contract/select.h"
#include "server/metrics/make_family.h"
#include "server/schedule/batcher.h"
#include "server/schedule/tenants.h"

namespace attend {

struct DeviceSeries {
  using Counter = prometheus::Counter;
  using Gauge = prometheus::Gauge;
  using Histogram = prometheus::Histogram;
  using ByDType = std::array<Counter*, kDTypes.size()>;

  // `made_in` must outlive it.
  DeviceSeries(prometheus::Registry& made_in, const std::string& name, int lanes,
               const std::vector<Tenant>& tenants);

  void Record(const BatchOutcome& outcome);

  prometheus::Registry& registry;
  const prometheus::Labels labels;
  Histogram& batch_requests = MakeHistogram(registry, "attend_batch_requests", "Requests per batch",
                                            {1, 2, 4, 8, 16, 32, 64, 128, 256}, labels);
  Histogram& batch_flops =
      MakeHistogram(registry, "attend_batch_flops", "Floating-point operations per batch",
                    {1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15}, labels);
  std::array<Counter*, kBatchClosedCount> batches = MakeCounters<kBatchClosedCount>(
      registry, "attend_batches_total", "Batches started, by why they took no more requests",
      "closed", {"empty", "delay", "requests", "flops", "bytes", "large", "deadlines"}, labels);
  std::array<Counter*, 3> phases =
      MakeCounters<3>(registry, "attend_device_phase_seconds_total",
                      "Time that batches spent in each phase, summed for each phase separately",
                      "phase", {"copy_in", "kernel", "copy_out"}, labels);
  Counter& span = MakeCounter(registry, "attend_device_span_seconds_total",
                              "Time of batches from the first byte in to the last byte out; less "
                              "than the sum of their phases where these overlap",
                              labels);
  Counter& cut_parts =
      MakeCounter(registry, "attend_cut_parts_total",
                  "Parts into which large requests were divided on one device", labels);
  Gauge& queue =
      MakeGauge(registry, "attend_queue_requests", "Requests waiting for a lane", labels);
  std::vector<Gauge*> tenant_queue;
  Gauge& lanes_busy =
      MakeGauge(registry, "attend_lanes_busy", "Lanes that run a batch now", labels);
  Gauge& outstanding = MakeGauge(registry, "attend_outstanding_cost",
                                 "Cost of waiting and running requests, in full batches", labels);
  Gauge& backlog = MakeGauge(
      registry, "attend_backlog_seconds",
      "Time that the device is expected to need for waiting and running requests", labels);
  Gauge& healthy =
      MakeGauge(registry, "attend_device_healthy", "1 while the device accepts work", labels);
  Gauge& memory_used =
      MakeGauge(registry, "attend_device_memory_used_bytes",
                "Device memory held by lanes and uploads; 0 if they use host memory", labels);
  Gauge& memory_limit =
      MakeGauge(registry, "attend_device_memory_limit_bytes",
                "Limit on device memory held by lanes and uploads; 0 if there is none", labels);
  // By kernel and dtype; null for kernels of other kinds of device.
  std::array<ByDType, kKernelCount> kernel_requests{};
  std::array<ByDType, kKernelCount> flops{};
  using ByFallback = std::array<Counter*, kFallbackNames.size()>;  // [0], of none, is null
  ByFallback fallback_requests{}, fallback_kernel_seconds{};
};

}  // namespace attend
