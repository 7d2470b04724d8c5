// SPDX-License-Identifier: Apache-2.0
//
// The server's shared memory: the memory of regions, their registry, and the socket from which
// clients get them.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "server/log/logging.h"
#include "server/regions/device_importer.h"
#include "server/regions/region_memory.h"
#include "server/regions/region_registry.h"
#include "server/regions/region_socket.h"

namespace attend {

struct SharedMemoryOptions {
  RegionSocket::Options socket;
  RegionLimits limits;
  bool cuda_ipc = false;
};

class SharedMemoryServer {
 public:
  // The socket is serving when this returns. `backends` are the engine's, in its order; they,
  // `allocator`, `logger` and `clock` must outlive the object, which must outlive every request.
  // FAILED_PRECONDITION: CUDA IPC is enabled but no device supports it.
  static Result<std::unique_ptr<SharedMemoryServer>> Start(const SharedMemoryOptions& options,
                                                           std::vector<Backend*> backends,
                                                           HostAllocator& allocator, Logger& logger,
                                                           const Clock& clock);

  // Releases every region, ends every connection and removes the socket. Requests keep their
  // memory. Returns whether that is complete: a region that is being made may take longer than
  // `until`.
  bool Stop(TimePoint until) { return socket_->Stop(until); }

  // Callers' rights have changed.
  void Recheck() { socket_->RecheckAll(); }

  const RegionRegistry& registry() const { return registry_; }
  RegionRegistry& registry() { return registry_; }
  const std::string& socket_path() const { return path_; }
  bool cuda_ipc() const { return cuda_ipc_; }

 private:
  SharedMemoryServer(const SharedMemoryOptions& options, std::vector<Backend*> backends,
                     HostAllocator& allocator, const Clock& clock);

  const std::string path_;
  const bool cuda_ipc_;
  MemfdMemory memory_;
  DeviceImporter importer_;
  RegionRegistry registry_;
  std::unique_ptr<RegionSocket> socket_;
};

}  // namespace attend
