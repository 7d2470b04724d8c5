// SPDX-License-Identifier: Apache-2.0
//
// What the settings mean to the server's parts. Pure, but for the number of hardware threads.

#pragma once

#include "server/chunked_registry.h"
#include "server/config.h"
#include "server/engine.h"

namespace attend {

// `gpu`: one of the devices is one, for defaults that depend on it.
EngineOptions MakeEngineOptions(const Config& config, bool gpu);
ChunkedOptions MakeChunkedOptions(const Config& config);

}  // namespace attend
