// SPDX-License-Identifier: Apache-2.0
//
// The part of Metrics with the families that have a label `device`. Recording is thread-safe; Add
// is not.

#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/contract/select.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"
#include "server/schedule/tenants.h"

namespace attend {

class DeviceMetrics {
 public:
  // `registry` must outlive it.
  explicit DeviceMetrics(prometheus::Registry& registry);

  // Adds the next device's label sets. Call before anything is recorded.
  void Add(const std::string& name, int lanes, const std::vector<Tenant>& tenants);

  // Records an answered request: attend_kernel_requests_total, and attend_flops_total of the
  // devices that computed it.
  void RecordAnswer(const Request& request);
  void RecordBatch(int device, int64_t requests, double flops, BatchClosed closed);
  void RecordOutcome(int device, const BatchOutcome& outcome);

  void SetQueue(int device, int64_t requests);
  void SetTenantQueue(int device, int tenant, int64_t requests);
  void SetLanesBusy(int device, int64_t lanes);
  void SetOutstanding(int device, double batches);
  void SetHealthy(int device, bool healthy);
  void SetMemory(int device, const DeviceMemoryUse& memory);

 private:
  static constexpr int kDTypeCount = 3;
  enum Phase { kCopyIn, kKernel, kCopyOut, kPhaseCount };
  using ByDType = std::array<prometheus::Counter*, kDTypeCount>;
  // The label sets of one device.
  struct Series {
    prometheus::Histogram* batch_requests = nullptr;
    prometheus::Histogram* batch_flops = nullptr;
    std::array<prometheus::Counter*, kBatchClosedCount> batches{};
    std::array<prometheus::Counter*, kPhaseCount> phases{};
    prometheus::Counter* span = nullptr;
    prometheus::Counter* cut_parts = nullptr;
    prometheus::Gauge* queue = nullptr;
    std::vector<prometheus::Gauge*> tenant_queue;
    prometheus::Gauge* lanes_busy = nullptr;
    prometheus::Gauge* outstanding = nullptr;
    prometheus::Gauge* healthy = nullptr;
    prometheus::Gauge* memory_used = nullptr;
    prometheus::Gauge* memory_limit = nullptr;
    // By kernel and dtype; null for kernels of other kinds of device.
    std::array<ByDType, kKernelCount> kernel_requests{};
    std::array<ByDType, kKernelCount> flops{};
  };

  void AddKernels(const std::string& name, Series* series);

  prometheus::Family<prometheus::Histogram>& batch_requests_;
  prometheus::Family<prometheus::Histogram>& batch_flops_;
  prometheus::Family<prometheus::Counter>& batches_;
  prometheus::Family<prometheus::Counter>& phases_;
  prometheus::Family<prometheus::Counter>& span_;
  prometheus::Family<prometheus::Counter>& cut_parts_;
  prometheus::Family<prometheus::Counter>& kernel_requests_;
  prometheus::Family<prometheus::Counter>& flops_;
  prometheus::Family<prometheus::Gauge>& queue_;
  prometheus::Family<prometheus::Gauge>& tenant_queue_;
  prometheus::Family<prometheus::Gauge>& lanes_;
  prometheus::Family<prometheus::Gauge>& lanes_busy_;
  prometheus::Family<prometheus::Gauge>& outstanding_;
  prometheus::Family<prometheus::Gauge>& healthy_;
  prometheus::Family<prometheus::Gauge>& memory_used_;
  prometheus::Family<prometheus::Gauge>& memory_limit_;
  std::vector<Series> devices_;
};

}  // namespace attend
