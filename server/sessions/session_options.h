// SPDX-License-Identifier: Apache-2.0
//
// Options of SessionTable.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "server/limits/tenant_limits.h"
#include "server/util/weight_share.h"

namespace attend {

// Session memory on one device.
struct SessionDevice {
  DeviceArena* arena = nullptr;  // null: this device has no sessions
  // Called with each page that becomes free; may be empty.
  std::function<void(char* data, int64_t bytes)> on_free;
};

struct SessionOptions {
  int64_t page_rows = 64;
  static constexpr int64_t kSlabBytes = int64_t{8} << 20;
  int64_t slab_bytes = kSlabBytes;
  int64_t sessions_max = 65536;
  int64_t layers_max = 512;  // of one session
  Duration lease_default = std::chrono::seconds(60);
  Duration lease_max = std::chrono::hours(24);
  // Determine each tenant's own part of the memory, of the sessions and of the tables.
  TenantWeights tenant_weights;
  int64_t table_bytes_max = int64_t{1} << 60;  // host memory for page lists and session records
  TenantLimits* limits = nullptr;              // per-tenant limits; null: none
  // A call that frees many sessions releases the lock after this many pages.
  int64_t pages_slice = int64_t{1} << 18;
};

}  // namespace attend
