// SPDX-License-Identifier: Apache-2.0

#include "server/info.h"

#include <chrono>
#include <string>

#include "kernels/limits.h"

namespace attend {
namespace {

void FillDevice(const Engine::DeviceState& state, v1::DeviceInfo* device) {
  device->set_name(state.info.name);
  device->set_description(state.info.description);
  device->set_memory_bytes(state.info.memory_bytes);
  device->set_units(state.info.units);
  device->set_lanes(state.lanes);
  device->set_compute_capability(state.info.compute_capability);
  device->set_healthy(state.healthy);
}

void FillKernel(const KernelInfo& info, const std::vector<Engine::DeviceState>& devices,
                v1::KernelInfo* kernel) {
  kernel->set_name(std::string(info.name));
  kernel->set_summary(std::string(info.summary));
  kernel->set_device_kind(info.device == DeviceKind::kCuda ? "cuda" : "cpu");
  for (const Engine::DeviceState& state : devices) {
    if (state.info.kind == info.device) kernel->set_available(true);
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    kernel->add_dtypes(static_cast<v1::DType>(dtype));
  }
  kernel->set_head_dim_max(static_cast<int32_t>(kHeadDimMax));
}

}  // namespace

void FillServerInfo(const Engine& engine, const Config& config, Duration uptime,
                    v1::GetServerInfoResponse* response) {
  response->set_version(Version());
  response->set_build(BuildText());
  const std::vector<Engine::DeviceState> devices = engine.Devices();
  for (const Engine::DeviceState& state : devices) FillDevice(state, response->add_devices());
  for (const KernelInfo& kernel : Kernels()) FillKernel(kernel, devices, response->add_kernels());
  v1::Limits* limits = response->mutable_limits();
  limits->set_request_bytes_max(config.max_request_bytes);
  limits->set_memory_budget_bytes(config.memory_budget_bytes);
  limits->set_queue_requests_max(config.max_queue);
  limits->set_head_dim_max(kHeadDimMax);
  limits->set_batch_max(kBatchMax);
  limits->set_heads_max(kHeadsMax);
  limits->set_length_max(kLengthMax);
  limits->set_stream_requests_max(config.stream_requests_max);
  response->add_transports("inline");
  response->set_reference_check(config.reference_check);
  response->set_uptime_seconds(std::chrono::duration<double>(uptime).count());
}

}  // namespace attend
