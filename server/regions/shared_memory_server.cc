// SPDX-License-Identifier: Apache-2.0

#include "server/regions/shared_memory_server.h"

#include <utility>

#include "server/util/assign.h"
#include "server/util/random_token.h"

namespace attend {
SharedMemoryServer::SharedMemoryServer(const SharedMemoryOptions& options,
                                       std::vector<Backend*> backends, HostAllocator& allocator,
                                       const Clock& clock)
    : path_(options.socket.path),
      cuda_ipc_(options.cuda_ipc),
      memory_(allocator),
      importer_(std::move(backends)),
      registry_(options.limits, memory_, clock, RandomToken,
                options.cuda_ipc ? &importer_ : nullptr) {}

Result<std::unique_ptr<SharedMemoryServer>> SharedMemoryServer::Start(
    const SharedMemoryOptions& options, std::vector<Backend*> backends, HostAllocator& allocator,
    Logger& logger, const Clock& clock) {
  std::unique_ptr<SharedMemoryServer> server(
      new SharedMemoryServer(options, std::move(backends), allocator, clock));
  if (server->cuda_ipc_ && !server->importer_.usable()) {
    return Status(Code::kFailedPrecondition,
                  "cuda-ipc is on, but no device of this server is a GPU");
  }
  ATTEND_RETURN_IF_ERROR(Assign(
      server->socket_, RegionSocket::Start(options.socket, server->registry_, logger, clock)));
  return server;
}

}  // namespace attend
