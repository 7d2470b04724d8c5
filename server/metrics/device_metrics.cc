// SPDX-License-Identifier: Apache-2.0

#include "server/metrics/device_metrics.h"

namespace attend {

DeviceSeries::DeviceSeries(prometheus::Registry& made_in, const std::string& name, int lanes,
                           const std::vector<Tenant>& tenants)
    : registry(made_in), labels({{"device", name}}) {
  for (const Tenant& tenant : tenants) {
    tenant_queue.push_back(&MakeGauge(registry, "attend_tenant_queue_requests",
                                      "Requests waiting for a lane, by tenant",
                                      {{"device", name}, {"tenant", tenant.name}}));
  }
  MakeGauge(registry, "attend_lanes", "Batches that a device can run at once", labels).Set(lanes);
  healthy.Set(1);
  const DeviceKind kind = name.starts_with("cuda") ? DeviceKind::kCuda : DeviceKind::kCpu;
  for (const KernelInfo& kernel : Kernels()) {
    if (kernel.device != kind) continue;
    const auto by_dtype = [&](const char* family, const char* help) {
      return MakeCounters<kDTypes.size()>(
          registry, family, help, "dtype",
          {DTypeName(kDTypes[0]), DTypeName(kDTypes[1]), DTypeName(kDTypes[2])},
          {{"kernel", std::string(kernel.name)}, {"device", name}});
    };
    const auto id = static_cast<size_t>(kernel.id);
    kernel_requests[id] =
        by_dtype("attend_kernel_requests_total", "Requests answered, by the kernel that ran");
    flops[id] = by_dtype("attend_flops_total", "Floating-point operations of answered requests");
  }
  for (size_t n = 1; n < kFallbackNames.size(); ++n) {
    const prometheus::Labels reason = {{"device", name},
                                       {"reason", std::string(kFallbackNames[n])}};
    fallback_requests[n] = &MakeCounter(
        registry, "attend_fallback_requests_total",
        "Answered requests that an option or their layout kept from the fastest kernel, or whose "
        "tensors were copied for it",
        reason);
    fallback_kernel_seconds[n] = &MakeCounter(
        registry, "attend_fallback_kernel_seconds_total",
        "Kernel time of these requests: their share of their batches' kernel time", reason);
  }
}

void DeviceSeries::Record(const BatchOutcome& outcome) {
  phases[0]->Increment(Seconds(outcome.copy_in_ns));
  phases[1]->Increment(Seconds(outcome.kernel_ns));
  phases[2]->Increment(Seconds(outcome.copy_out_ns));
  span.Increment(Seconds(outcome.span_ns));
  if (outcome.cut_parts > 0) cut_parts.Increment(static_cast<double>(outcome.cut_parts));
}

}  // namespace attend
