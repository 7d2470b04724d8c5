// SPDX-License-Identifier: Apache-2.0
//
// Shared memory as one part of the server: the regions' memory, their registry, and the socket that
// clients get them from.

#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>
#include <spdlog/logger.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "server/config.h"
#include "server/region_memory.h"
#include "server/region_registry.h"
#include "server/region_socket.h"

namespace attend {

class SharedMemoryServer {
 public:
  // Serving when it returns. `allocator` and `logger` must outlive the object, which must outlive
  // every request.
  static Result<std::unique_ptr<SharedMemoryServer>> Start(const Config& config,
                                                           HostAllocator& allocator,
                                                           spdlog::logger& logger);

  // Forgets every region, ends every connection and removes the socket. Requests keep their memory.
  // True if that is done: a region that is being made may take longer than `until`.
  bool Stop(TimePoint until) { return socket_->Stop(until); }

  const RegionRegistry& registry() const { return registry_; }
  const std::string& socket_path() const { return path_; }

 private:
  SharedMemoryServer(const Config& config, HostAllocator& allocator);

  const std::string path_;
  MemfdMemory memory_;
  RegionRegistry registry_;
  std::unique_ptr<RegionSocket> socket_;
};

// attend_shared_memory_bytes{state}, _limit_bytes, _regions, _clients, _regions_created_total and
// _regions_refused_total, read at each scrape; zeros without a registry.
class SharedMemoryStats final : public prometheus::Collectable {
 public:
  // Null: shared memory is off. Else it must outlive this object.
  explicit SharedMemoryStats(const RegionRegistry* registry) : registry_(registry) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const RegionRegistry* const registry_;
};

}  // namespace attend
