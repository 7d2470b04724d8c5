// SPDX-License-Identifier: Apache-2.0
//
// What the settings mean to the server's parts. Pure, but for the number of hardware threads.

#pragma once

#include "server/chunked_registry.h"
#include "server/config.h"
#include "server/dump.h"
#include "server/engine.h"

namespace attend {

// `gpu`: one of the devices is one, for defaults that depend on it.
EngineOptions MakeEngineOptions(const Config& config, bool gpu);
ChunkedOptions MakeChunkedOptions(const Config& config);
Dumper::Options MakeDumperOptions(const Config& config);
// Bytes that requests, messages on their way, shared regions and open calls may take together.
int64_t MemoryMost(const Config& config);
Duration WriteTimeout(const Config& config);
// Of messages that requests keep where they arrived, in so much page-locked memory (0: none).
int64_t HeldBytesMax(const Config& config, int64_t receive_memory_bytes);

}  // namespace attend
