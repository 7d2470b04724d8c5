// SPDX-License-Identifier: Apache-2.0

#include "server/metrics/device_metrics.h"

#include "server/metrics/metric_families.h"

namespace attend {
namespace {

using prometheus::Histogram;

constexpr std::array<const char*, kBatchClosedCount> kBatchClosedNames = {
    "empty", "delay", "requests", "flops", "bytes", "large"};
constexpr std::array<DType, 3> kDTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

Histogram::BucketBoundaries BatchBuckets() { return {1, 2, 4, 8, 16, 32, 64, 128, 256}; }
Histogram::BucketBoundaries FlopsBuckets() {
  return {1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
}

}  // namespace

DeviceMetrics::DeviceMetrics(prometheus::Registry& registry)
    : batch_requests_(MakeHistogram(registry, "attend_batch_requests", "Requests per batch")),
      batch_flops_(
          MakeHistogram(registry, "attend_batch_flops", "Floating-point operations per batch")),
      batches_(MakeCounter(registry, "attend_batches_total",
                           "Batches started, by why they took no more requests")),
      phases_(MakeCounter(registry, "attend_device_phase_seconds_total",
                          "Time that batches spent in each phase, each phase summed up by itself")),
      span_(MakeCounter(registry, "attend_device_span_seconds_total",
                        "Time of batches from the first byte in to the last byte out; less than "
                        "their phases' sum where these overlapped")),
      cut_parts_(MakeCounter(registry, "attend_cut_parts_total",
                             "Parts that large requests were computed in on one device")),
      kernel_requests_(MakeCounter(registry, "attend_kernel_requests_total",
                                   "Requests answered, by the kernel that ran")),
      flops_(MakeCounter(registry, "attend_flops_total",
                         "Floating-point operations of answered requests")),
      queue_(MakeGauge(registry, "attend_queue_requests", "Requests waiting for a lane")),
      tenant_queue_(MakeGauge(registry, "attend_tenant_queue_requests",
                              "Requests waiting for a lane, by tenant")),
      lanes_(MakeGauge(registry, "attend_lanes", "Batches that a device can run at once")),
      lanes_busy_(MakeGauge(registry, "attend_lanes_busy", "Lanes that run a batch now")),
      outstanding_(MakeGauge(registry, "attend_outstanding_cost",
                             "Cost of the requests that wait or run, in full batches")),
      healthy_(MakeGauge(registry, "attend_device_healthy", "1 while the device takes work")),
      memory_used_(
          MakeGauge(registry, "attend_device_memory_used_bytes",
                    "Device memory held by lanes and uploads; 0 where they use the host's")),
      memory_limit_(MakeGauge(registry, "attend_device_memory_limit_bytes",
                              "Bound of the device memory that they hold; 0 where there is none")) {
}

void DeviceMetrics::Add(const std::string& name, int lanes, const std::vector<Tenant>& tenants) {
  constexpr std::array<const char*, kPhaseCount> kPhaseNames = {"copy_in", "kernel", "copy_out"};
  const prometheus::Labels labels = {{"device", name}};
  Series series;
  series.batch_requests = &batch_requests_.Add(labels, BatchBuckets());
  series.batch_flops = &batch_flops_.Add(labels, FlopsBuckets());
  for (int i = 0; i < kBatchClosedCount; ++i) {
    series.batches[i] = &batches_.Add({{"device", name}, {"closed", kBatchClosedNames[i]}});
  }
  for (int i = 0; i < kPhaseCount; ++i) {
    series.phases[i] = &phases_.Add({{"device", name}, {"phase", kPhaseNames[i]}});
  }
  series.span = &span_.Add(labels);
  series.cut_parts = &cut_parts_.Add(labels);
  series.queue = &queue_.Add(labels);
  for (const Tenant& tenant : tenants) {
    series.tenant_queue.push_back(&tenant_queue_.Add({{"device", name}, {"tenant", tenant.name}}));
  }
  lanes_.Add(labels).Set(lanes);
  series.lanes_busy = &lanes_busy_.Add(labels);
  series.outstanding = &outstanding_.Add(labels);
  series.healthy = &healthy_.Add(labels);
  series.healthy->Set(1);
  series.memory_used = &memory_used_.Add(labels);
  series.memory_limit = &memory_limit_.Add(labels);
  AddKernels(name, &series);
  devices_.push_back(std::move(series));
}

void DeviceMetrics::AddKernels(const std::string& name, Series* series) {
  const DeviceKind kind = name.starts_with("cuda") ? DeviceKind::kCuda : DeviceKind::kCpu;
  for (const KernelInfo& kernel : Kernels()) {
    if (kernel.device != kind) continue;
    for (size_t i = 0; i < kDTypes.size(); ++i) {
      const prometheus::Labels labels = {{"kernel", std::string(kernel.name)},
                                         {"dtype", std::string(DTypeName(kDTypes[i]))},
                                         {"device", name}};
      series->kernel_requests[static_cast<size_t>(kernel.id)][i] = &kernel_requests_.Add(labels);
      series->flops[static_cast<size_t>(kernel.id)][i] = &flops_.Add(labels);
    }
  }
}

void DeviceMetrics::RecordAnswer(const Request& request) {
  if (request.device < 0 || request.device >= static_cast<int>(devices_.size())) return;
  const Series& device = devices_[request.device];
  const size_t kernel = static_cast<size_t>(request.selection.kernel);
  const size_t dtype = static_cast<size_t>(request.attention.problem.dtype) - 1;
  if (device.flops[kernel][dtype] == nullptr) return;
  device.kernel_requests[kernel][dtype]->Increment();
  if (request.device_flops.empty()) device.flops[kernel][dtype]->Increment(request.flops);
  for (const Request::DeviceFlops& each : request.device_flops) {
    devices_[each.device].flops[kernel][dtype]->Increment(each.flops);
  }
}

void DeviceMetrics::RecordBatch(int device, int64_t requests, double flops, BatchClosed closed) {
  devices_[device].batch_requests->Observe(static_cast<double>(requests));
  devices_[device].batch_flops->Observe(flops);
  devices_[device].batches[static_cast<size_t>(closed)]->Increment();
}

void DeviceMetrics::RecordOutcome(int device, const BatchOutcome& outcome) {
  const Series& series = devices_[device];
  series.phases[kCopyIn]->Increment(Seconds(outcome.copy_in_ns));
  series.phases[kKernel]->Increment(Seconds(outcome.kernel_ns));
  series.phases[kCopyOut]->Increment(Seconds(outcome.copy_out_ns));
  series.span->Increment(Seconds(outcome.span_ns));
  if (outcome.cut_parts > 0) series.cut_parts->Increment(static_cast<double>(outcome.cut_parts));
}

void DeviceMetrics::SetQueue(int device, int64_t requests) {
  devices_[device].queue->Set(static_cast<double>(requests));
}

void DeviceMetrics::SetTenantQueue(int device, int tenant, int64_t requests) {
  devices_[device].tenant_queue[tenant]->Set(static_cast<double>(requests));
}

void DeviceMetrics::SetLanesBusy(int device, int64_t lanes) {
  devices_[device].lanes_busy->Set(static_cast<double>(lanes));
}

void DeviceMetrics::SetOutstanding(int device, double batches) {
  devices_[device].outstanding->Set(batches);
}

void DeviceMetrics::SetHealthy(int device, bool healthy) {
  devices_[device].healthy->Set(healthy ? 1 : 0);
}

void DeviceMetrics::SetMemory(int device, const DeviceMemoryUse& memory) {
  devices_[device].memory_used->Set(static_cast<double>(memory.used_bytes));
  devices_[device].memory_limit->Set(static_cast<double>(memory.limit_bytes));
}

}  // namespace attend
