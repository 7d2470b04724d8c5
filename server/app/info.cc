// SPDX-License-Identifier: Apache-2.0

#include "server/app/info.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/contract/limits.h"
#include "kernels/contract/select.h"
#include "server/memory/range_allocator.h"
#include "server/wire/chunk_codec.h"
#include "server/wire/session_uses.h"

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
  device->set_uuid(state.info.uuid);
}

// Whether the kernel takes tensors of the dtype on the device, memory permitting.
bool Takes(const KernelInfo& kernel, DType dtype, const DeviceInfo& device) {
  Problem p;
  p.dtype = dtype;
  p.batch = p.heads_q = p.heads_kv = p.len_q = p.len_k = 1;
  p.dim = p.dim_v = 64;
  p.scale = 1.0f;
  return Select(p, device, kernel.name).ok();
}

// A device with the capabilities of all devices of its kind.
DeviceInfo AnyDevice(DeviceKind kind) {
  DeviceInfo device;
  device.kind = kind;
  device.compute_capability = kind == DeviceKind::kCuda ? 90 : 0;
  device.workspace_bytes_max = INT64_MAX;
  device.not_amx = {};
  return device;
}

void FillKernel(const KernelInfo& info, const std::vector<Engine::DeviceState>& devices,
                v1::KernelInfo* kernel) {
  kernel->set_name(std::string(info.name));
  kernel->set_summary(std::string(info.summary));
  kernel->set_device_kind(info.device == DeviceKind::kCuda ? "cuda" : "cpu");
  for (const DType dtype : kDTypes) {
    if (!Takes(info, dtype, AnyDevice(info.device))) continue;
    kernel->add_dtypes(static_cast<v1::DType>(dtype));
    for (const Engine::DeviceState& state : devices) {
      if (Takes(info, dtype, state.info)) kernel->set_available(true);
    }
  }
  kernel->set_head_dim_max(static_cast<int32_t>(kHeadDimMax));
}

void FillSharedMemory(const SharedMemoryServer& shared, v1::SharedMemoryInfo* info) {
  const RegionLimits& limits = shared.registry().limits();
  info->set_socket(shared.socket_path());
  info->set_offset_alignment(kTensorAlignBytes);
  info->set_bytes_max(limits.bytes_max);
  info->set_client_bytes_max(limits.client_bytes_max);
  info->set_client_regions_max(limits.client_regions_max);
  info->set_cuda_ipc(shared.cuda_ipc());
}

void FillSessions(const SessionTable& sessions, v1::GetServerInfoResponse* response) {
  const auto seconds = [](Duration d) { return std::chrono::duration<double>(d).count(); };
  const SessionOptions& options = sessions.options();
  v1::SessionsInfo* const info = response->mutable_sessions();
  info->set_sessions_max(options.sessions_max);
  info->set_request_sessions_max(kRequestSessionsMax);
  info->set_layers_max(options.layers_max);
  info->set_page_tokens(options.page_rows);
  info->set_lease_seconds_default(seconds(options.lease_default));
  info->set_lease_seconds_max(seconds(options.lease_max));
  info->set_append_id_bytes_max(kAppendIdBytesMax);
  for (int i = 0; i < response->devices_size(); ++i) {
    response->mutable_devices(i)->set_session_bytes_max(sessions.memory(i).total_bytes);
  }
}

// The highest limit of any device; 0: one has no limit.
double RequestGflopMax(const Engine& engine) {
  double most = 0;
  for (size_t i = 0; i < engine.backends().size(); ++i) {
    most = std::max(most, engine.RequestCostMax(static_cast<int>(i)) * 1e-9);
  }
  return std::isfinite(most) ? most : 0;
}

// The tenant's session bytes on the device where it has most.
int64_t SessionBytes(const SessionTable& sessions, size_t devices, int tenant) {
  int64_t most = 0;
  for (size_t n = 0; n < devices; ++n) {
    const std::vector<int64_t> bytes = sessions.tenant_bytes(static_cast<int>(n));
    most = std::max(most, bytes[static_cast<size_t>(tenant)]);
  }
  return most;
}

}  // namespace

void FillTenant(const Engine& engine, const TenantLimits& limits, int tenant,
                const SessionTable* sessions, v1::TenantInfo* info) {
  info->set_name(engine.options().tenants.list()[static_cast<size_t>(tenant)].name);
  for (const Limit limit : kLimits) {
    const TenantLimits::Use use = limits.use(tenant, limit);
    v1::TenantLimit* const out = info->add_limits();
    out->set_name(std::string(LimitKey(limit)));
    const bool elsewhere = limit == Limit::kSessionMemory && sessions != nullptr;
    out->set_used(elsewhere ? SessionBytes(*sessions, engine.backends().size(), tenant) : use.used);
    if (use.most != kUnlimited) out->set_most(use.most);
    out->set_per_second(use.per_second);
    out->set_refused(use.refused);
  }
}

void FillServerInfo(const Engine& engine, const Config& config, const SharedMemoryServer* shared,
                    const SessionTable* sessions, Duration uptime,
                    v1::GetServerInfoResponse* response) {
  response->set_version(Version());
  response->set_build(BuildText());
  response->set_server_id(config.server_id);
  const std::vector<Engine::DeviceState> devices = engine.Devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    FillDevice(devices[i], response->add_devices());
    response->mutable_devices(static_cast<int>(i))
        ->set_staging_bytes_max(engine.staging().limit(static_cast<int>(i)).bytes_max);
  }
  for (const KernelInfo& kernel : Kernels()) FillKernel(kernel, devices, response->add_kernels());
  v1::Limits* limits = response->mutable_limits();
  limits->set_request_bytes_max(config.max_request_bytes);
  limits->set_memory_budget_bytes(config.memory_budget_bytes);
  limits->set_queue_requests_max(config.max_queue);
  limits->set_request_gflop_max(RequestGflopMax(engine));
  limits->set_checks_max(config.max_checks);
  limits->set_head_dim_max(kHeadDimMax);
  limits->set_batch_max(kBatchMax);
  limits->set_heads_max(kHeadsMax);
  limits->set_length_max(kLengthMax);
  limits->set_stream_requests_max(config.stream_requests_max);
  limits->set_chunk_bytes_max(ChunkBytesMax(config.max_request_bytes));
  limits->set_chunked_streams_max(static_cast<int32_t>(config.chunked_streams_max));
  for (int i = 0; i < kTransportCount; ++i) {
    const Transport transport = static_cast<Transport>(i);
    if (transport == Transport::kSharedMemory && shared == nullptr) continue;
    if (transport == Transport::kCudaIpc && (shared == nullptr || !shared->cuda_ipc())) continue;
    response->add_transports(std::string(TransportName(transport)));
  }
  for (const Tenant& tenant : config.tenants.list()) response->add_tenants(tenant.name);
  if (shared != nullptr) FillSharedMemory(*shared, response->mutable_shared_memory());
  if (sessions != nullptr) FillSessions(*sessions, response);
  response->set_reference_check(config.reference_check);
  response->set_uptime_seconds(std::chrono::duration<double>(uptime).count());
}

}  // namespace attend
