// SPDX-License-Identifier: Apache-2.0
//
// What GetServerInfo says. Pure but for the engine's present state.

#pragma once

#include "attend/v1/attention.pb.h"
#include "server/clock.h"
#include "server/config.h"
#include "server/engine.h"

namespace attend {

void FillServerInfo(const Engine& engine, const Config& config, Duration uptime,
                    v1::GetServerInfoResponse* response);

}  // namespace attend
