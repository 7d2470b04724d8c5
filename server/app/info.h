// SPDX-License-Identifier: Apache-2.0
//
// Fills GetServerInfo's answer. Pure but for the engine's current state.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/clock.h"
#include "server/app/config.h"
#include "server/engine/engine.h"
#include "server/regions/shared_memory_server.h"
#include "server/sessions/session_table.h"

namespace attend {

// `shared` is null if shared memory is off, `sessions` if they are.
void FillServerInfo(const Engine& engine, const Config& config, const SharedMemoryServer* shared,
                    const SessionTable* sessions, Duration uptime,
                    v1::GetServerInfoResponse* response);

}  // namespace attend
