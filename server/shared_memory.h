// SPDX-License-Identifier: Apache-2.0
//
// Shared memory as one part of the server: the regions' memory, their registry, and the socket that
// clients get them from.

#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "server/config.h"
#include "server/device_importer.h"
#include "server/engine.h"
#include "server/logging.h"
#include "server/region_memory.h"
#include "server/region_registry.h"
#include "server/region_socket.h"

namespace attend {

class SharedMemoryServer {
 public:
  // Serving when it returns. `engine`'s allocator and backends, and `logger`, must outlive the
  // object, which must outlive every request. FAILED_PRECONDITION: CUDA IPC is asked for, and no
  // device has it.
  static Result<std::unique_ptr<SharedMemoryServer>> Start(const Config& config,
                                                           const Engine& engine,
                                                           HostAllocator& allocator,
                                                           Logger& logger);

  // Forgets every region, ends every connection and removes the socket. Requests keep their memory.
  // True if that is done: a region that is being made may take longer than `until`.
  bool Stop(TimePoint until) { return socket_->Stop(until); }

  const RegionRegistry& registry() const { return registry_; }
  const std::string& socket_path() const { return path_; }
  bool cuda_ipc() const { return cuda_ipc_; }

 private:
  SharedMemoryServer(const Config& config, const Engine& engine, HostAllocator& allocator);

  const std::string path_;
  const bool cuda_ipc_;
  MemfdMemory memory_;
  DeviceImporter importer_;
  RegionRegistry registry_;
  std::unique_ptr<RegionSocket> socket_;
};

// attend_shared_memory_bytes{state}, _limit_bytes, _regions, _clients, _regions_created_total and
// _regions_refused_total, attend_cuda_ipc_bytes and _regions, read at each scrape; zeros without a
// registry.
class SharedMemoryStats final : public prometheus::Collectable {
 public:
  // Null: shared memory is off. Else it must outlive this object.
  explicit SharedMemoryStats(const RegionRegistry* registry) : registry_(registry) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const RegionRegistry* const registry_;
};

}  // namespace attend
