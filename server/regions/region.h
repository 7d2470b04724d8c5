// SPDX-License-Identifier: Apache-2.0
//
// A region: memory on the server's host, or of one of its GPUs, that a client shares with the
// server. The registry has them by token; requests keep those that their tensors are in.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/limits/tenant_limits.h"
#include "server/regions/device_importer.h"
#include "server/regions/region_memory.h"

namespace attend {

// Immutable except for what is the registry's, and for its bytes, which the client may write at any
// time.
struct SharedRegion {
  static constexpr int kHost = -1;
  static constexpr int kAnyTenant = -1;

  std::string token;
  char* data = nullptr;
  int64_t bytes = 0;
  uint64_t client = 0;
  int tenant = kAnyTenant;  // whose requests may name it
  int device = kHost;       // kHost, or the index of the GPU whose memory is lent
  DeviceImport imported;    // if lent
  CountHold counted;        // its bytes among its tenant's; lent ones are not counted
  // The registry's.
  Pages pages = Pages::kFreed;   // when it is closed
  SharedRegion* next = nullptr;  // while it waits to be closed
};
// Keeps the memory alive.
using RegionRef = std::shared_ptr<const SharedRegion>;

}  // namespace attend
