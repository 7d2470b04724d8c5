// SPDX-License-Identifier: Apache-2.0

#include "server/app/start_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <string_view>

#include "kernels/util/counted.h"
#include "server/app/options.h"
#include "server/memory/host_memory.h"
#include "server/memory/ledger.h"
#include "server/memory/range_allocator.h"
#include "server/util/byte_size.h"

namespace attend {
namespace {

std::string CongestionControl() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_congestion_control");
  std::string name;
  file >> name;
  return name.empty() ? "unknown" : name;
}

// The kernels that run on at least one of the devices.
std::vector<std::string_view> KernelNames(const std::vector<Engine::DeviceState>& devices) {
  std::vector<std::string_view> names;
  for (const KernelInfo& kernel : Kernels()) {
    const bool runs = std::any_of(devices.begin(), devices.end(), [&](const auto& device) {
      return device.info.kind == kernel.device;
    });
    if (runs) names.emplace_back(kernel.name);
  }
  return names;
}

// Logs each tenant's own part of the memory budget.
void LogParts(const Config& config, Logger& logger) {
  const TenantParts parts = DivideByWeight(config.memory_budget_bytes, config.tenants.weights(),
                                           RangeAllocator::kUnitBytes);
  std::vector<std::string> of_tenants;
  for (size_t i = 0; i < parts.own.size(); ++i) {
    of_tenants.push_back(config.tenants.list()[i].name + " " + RoundByteSize(parts.own[i]));
  }
  logger.info("memory reserved per tenant: {}; common: {}", fmt::join(of_tenants, ", "),
              RoundByteSize(parts.common));
}

const char* OnOff(bool on) { return on ? "on" : "off"; }

}  // namespace

void LogStart(const Config& config, const StartFacts& facts, Logger& logger) {
  logger.info("{}", VersionText());
  for (const Engine::DeviceState& state : facts.devices) {
    logger.info("device {}: {}, {}, {}, {} of memory", state.info.name, state.info.description,
                Counted(state.info.units, "unit"), Counted(state.lanes, "lane"),
                RoundByteSize(state.info.memory_bytes));
  }
  logger.info("kernels: {}", fmt::join(KernelNames(facts.devices), ", "));
  logger.info(
      "limits: message {}, memory {}, queue {} requests, batch {} requests, stream {} requests, {} "
      "calls per connection, chunked requests {} streams and {} s idle, reference check {}",
      RoundByteSize(config.max_request_bytes), RoundByteSize(config.memory_budget_bytes),
      config.max_queue, config.max_batch_requests, config.stream_requests_max, MaxStreams(config),
      config.chunked_streams_max, config.chunked_idle_timeout_seconds, config.reference_check);
  std::vector<DeviceInfo> devices;
  for (const Engine::DeviceState& state : facts.devices) devices.push_back(state.info);
  const MemoryLimit memory = ProcessMemoryLimit();
  const int64_t most = MemoryMost(config, devices);
  if (most > memory.bytes / 5 * 4) {
    logger.warn(
        "memory-budget, message-memory-max, shared-memory-max, oip-shared-memory-bytes of each "
        "tenant, session-memory and 56 KiB for each of max-calls add up to {}, but {} has {}: "
        "under load the system may kill the server",
        RoundByteSize(most), memory.whose, RoundByteSize(memory.bytes));
  }
  std::vector<std::string> tenants;
  for (const Tenant& tenant : config.tenants.list()) {
    tenants.push_back(tenant.name + "=" + std::to_string(tenant.weight));
  }
  logger.info("tenants: {}; priorities age after {} ms", fmt::join(tenants, ", "),
              config.priority_aging_ms);
  if (!config.tenants.single()) LogParts(config, logger);
  logger.info("tcp congestion control: {}; allocator tuning: {}; page-locked receive memory: {}",
              CongestionControl(), OnOff(config.allocator_tuning),
              RoundByteSize(facts.receive_memory_bytes));
  logger.info("connections: {}, {} per peer; open calls: {}, {} per peer; descriptors: {}",
              facts.connections.connections, facts.connections.per_peer, MaxCalls(config),
              MaxCallsPerPeer(config), DescriptorsMax());
  logger.info("server id: {}; connection age: {}; load reports: {}", config.server_id,
              config.max_connection_age_seconds > 0
                  ? fmt::format("up to {} s", config.max_connection_age_seconds)
                  : std::string("any"),
              OnOff(config.load_reports));
  const bool shared = !facts.shared_memory_socket.empty();
  logger.info("shared memory: {}; CUDA IPC: {}",
              shared ? "on " + facts.shared_memory_socket : std::string("off"),
              OnOff(facts.cuda_ipc));
  const auto or_off = [](const std::string& text) { return text.empty() ? "off" : text; };
  logger.info("open inference protocol: {}; its shared memory: {}, on GPUs: {}", OnOff(config.oip),
              or_off(config.oip_shared_memory), OnOff(config.oip_cuda_shared_memory));
  const bool metrics = !facts.metrics_address.empty();
  const std::string scheme = MetricsAccessOf(config).tls.cert.empty() ? "http://" : "https://";
  logger.info("serving gRPC on {}; metrics {}", fmt::join(facts.addresses, ", "),
              metrics ? "on " + scheme + facts.metrics_address + "/metrics" : std::string("off"));
}

}  // namespace attend
