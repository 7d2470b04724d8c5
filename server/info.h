// SPDX-License-Identifier: Apache-2.0
//
// What GetServerInfo says. Pure but for the engine's present state.

#pragma once

#include "attend/v1/attention.pb.h"
#include "server/clock.h"
#include "server/config.h"
#include "server/engine.h"
#include "server/shared_memory.h"

namespace attend {

// `shared` is null if shared memory is off.
void FillServerInfo(const Engine& engine, const Config& config, const SharedMemoryServer* shared,
                    Duration uptime, v1::GetServerInfoResponse* response);

}  // namespace attend
