// SPDX-License-Identifier: Apache-2.0
//
// Converts settings to the options of the server's components. Pure, apart from the number of
// hardware threads.

#pragma once

#include <span>
#include <vector>

#include "server/app/config.h"
#include "server/app/dump.h"
#include "server/engine/engine.h"
#include "server/limits/tenant_bounds.h"
#include "server/log/logging.h"
#include "server/regions/shared_memory_server.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/request_reader.h"
#include "server/sessions/session_table.h"
#include "server/util/random_token.h"

namespace attend {

Duration Seconds(double seconds);
// --server-id, or 16 digits from `random`.
Result<std::string> ServerId(const Config& config, const TokenSource& random);
// `gpu`: one of the devices is a GPU, which some defaults depend on.
EngineOptions MakeEngineOptions(const Config& config, bool gpu);
ChunkedOptions MakeChunkedOptions(const Config& config);
Dumper::Options MakeDumperOptions(const Config& config);
LogSettings MakeLogSettings(const Config& config);
// Whether only the server's own user, and root, may open its Unix sockets.
bool SocketsArePrivate(const Config& config);
SharedMemoryOptions MakeSharedMemoryOptions(const Config& config);
// By tenant.
std::vector<TenantBounds> MakeTenantBounds(const Config& config);
SessionOptions MakeSessionOptions(const Config& config);
// Host memory for page tables.
int64_t SessionTableBytes(const Config& config);
// Memory for sessions on the device.
int64_t SessionBytes(const Config& config, const DeviceInfo& device);
// Maximum bytes of host memory for requests, messages in transit, shared regions, sessions on the
// CPU, checks of sessions on a GPU and open calls together.
int64_t MemoryMost(const Config& config, std::span<const DeviceInfo> devices);
Duration WriteTimeout(const Config& config);
// `receive_memory`: the page-locked memory that messages are received in; null if there is none.
RequestReader::Limits MakeReaderLimits(const Config& config, const ReceiveMemory* receive_memory);

}  // namespace attend
