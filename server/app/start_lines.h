// SPDX-License-Identifier: Apache-2.0
//
// Log lines about a started server: its version, devices, limits and addresses.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/app/config.h"
#include "server/engine/engine.h"
#include "server/log/logging.h"
#include "server/net/connection_limits.h"

namespace attend {

struct StartFacts {
  std::vector<Engine::DeviceState> devices;
  int64_t receive_memory_bytes = 0;  // page-locked
  ConnectionLimits connections;
  std::string shared_memory_socket;  // empty: off
  bool cuda_ipc = false;
  std::vector<std::string> addresses;
  std::string metrics_address;  // empty: none
};

void LogStart(const Config& config, const StartFacts& facts, Logger& logger);

}  // namespace attend
