// SPDX-License-Identifier: Apache-2.0
//
// A region: memory that a client shares with the server, on the server's host or one of its GPUs.
// The registry finds regions by token; requests keep those that their tensors are in.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/limits/tenant_limits.h"
#include "server/regions/device_importer.h"
#include "server/regions/region_memory.h"

namespace attend {

// Immutable, except for the registry's own fields and for the bytes, which the client may write at
// any time.
struct SharedRegion {
  static constexpr int kHost = -1;
  static constexpr int kAnyTenant = -1;

  std::string token;
  char* data = nullptr;
  int64_t bytes = 0;
  uint64_t client = 0;
  int tenant = kAnyTenant;  // whose requests may name it
  int device = kHost;       // kHost, or the index of the GPU whose memory is lent
  DeviceImport imported;    // set for lent memory
  CountHold counted;        // counts its bytes against its tenant; not for lent memory
  // Used by the registry only.
  Pages pages = Pages::kFreed;   // what closing it does to its pages
  SharedRegion* next = nullptr;  // links regions waiting to be closed
};
// Keeps the memory alive.
using RegionRef = std::shared_ptr<const SharedRegion>;

}  // namespace attend
