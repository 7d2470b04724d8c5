// SPDX-License-Identifier: Apache-2.0

#include "server/shared_memory.h"

#include <utility>

#include "server/unix_listener.h"

namespace attend {
namespace {

prometheus::MetricFamily Family(prometheus::MetricType type, const char* name, const char* help) {
  return {name, help, type, {}};
}

prometheus::MetricFamily GaugeFamily(const char* name, const char* help, int64_t value) {
  prometheus::MetricFamily family = Family(prometheus::MetricType::Gauge, name, help);
  family.metric.emplace_back().gauge.value = static_cast<double>(value);
  return family;
}

prometheus::MetricFamily CounterFamily(const char* name, const char* help, int64_t value) {
  prometheus::MetricFamily family = Family(prometheus::MetricType::Counter, name, help);
  family.metric.emplace_back().counter.value = static_cast<double>(value);
  return family;
}

}  // namespace

SharedMemoryServer::SharedMemoryServer(const Config& config, const Engine& engine,
                                       HostAllocator& allocator)
    : path_(config.shared_memory_socket.empty() ? DefaultSocketPath()
                                                : config.shared_memory_socket),
      cuda_ipc_(config.cuda_ipc),
      memory_(allocator),
      importer_(engine.backends()),
      registry_({config.shared_memory_max_bytes, config.shared_memory_client_max_bytes,
                 config.shared_memory_client_regions},
                memory_, RandomToken, config.cuda_ipc ? &importer_ : nullptr) {}

Result<std::unique_ptr<SharedMemoryServer>> SharedMemoryServer::Start(const Config& config,
                                                                      const Engine& engine,
                                                                      HostAllocator& allocator,
                                                                      Logger& logger) {
  std::unique_ptr<SharedMemoryServer> server(new SharedMemoryServer(config, engine, allocator));
  if (server->cuda_ipc_ && !server->importer_.usable()) {
    return Status(Code::kFailedPrecondition,
                  "cuda-ipc is on, but no device of this server is a GPU");
  }
  RegionSocket::Options options;
  options.path = server->path_;
  options.any_user = config.shared_memory_any_user;
  Result<std::unique_ptr<RegionSocket>> socket =
      RegionSocket::Start(options, server->registry_, logger);
  if (!socket.ok()) return socket.status();
  server->socket_ = std::move(*socket);
  return server;
}

std::vector<prometheus::MetricFamily> SharedMemoryStats::Collect() const {
  RegionRegistry::Stats stats;
  if (registry_ != nullptr) stats = registry_->stats();
  prometheus::MetricFamily bytes = Family(
      prometheus::MetricType::Gauge, "attend_shared_memory_bytes",
      "Shared memory of regions that are open, and of those being made or no longer named but in "
      "use");
  for (const auto& [state, value] :
       {std::pair{"open", stats.bytes}, std::pair{"changing", stats.changing_bytes}}) {
    prometheus::ClientMetric& metric = bytes.metric.emplace_back();
    metric.label.push_back({"state", state});
    metric.gauge.value = static_cast<double>(value);
  }
  return {std::move(bytes),
          GaugeFamily("attend_shared_memory_limit_bytes", "Bound of shared memory; 0: off",
                      registry_ == nullptr ? 0 : registry_->limits().bytes_max),
          GaugeFamily("attend_shared_memory_regions", "Shared regions that requests can name",
                      stats.regions),
          GaugeFamily("attend_shared_memory_clients", "Connections to the shared memory's socket",
                      stats.clients),
          CounterFamily("attend_shared_memory_regions_created_total", "Shared regions created",
                        stats.created),
          CounterFamily("attend_shared_memory_regions_refused_total",
                        "Shared regions asked for and not created", stats.refused),
          GaugeFamily("attend_cuda_ipc_regions", "Regions of GPUs' memory that clients lend",
                      stats.lent_regions),
          GaugeFamily("attend_cuda_ipc_bytes", "Bytes of GPUs' memory that clients lend",
                      stats.lent_bytes)};
}

}  // namespace attend
