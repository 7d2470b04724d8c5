// SPDX-License-Identifier: Apache-2.0
//
// How many connections a server takes, by its settings and by what the system lets it open.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"

namespace attend {

struct ConnectionLimits {
  int64_t connections = 0;
  int64_t per_peer = 0;
};

// Descriptors that a process must have left for anything but connections.
inline constexpr int64_t kOtherDescriptors = 64;
// By default no server takes more connections than this, however many descriptors it may have.
inline constexpr int64_t kDefaultConnectionsMax = 16384;

// Fills in what is 0: three quarters of the descriptors, of which one peer gets a quarter, as
// shared memory, metrics, logs and devices need some too. An error if `limits` asks for more
// connections than `descriptors` allow. Pure.
Result<ConnectionLimits> LimitConnections(ConnectionLimits limits, int64_t descriptors);

struct DescriptorLimit {
  int64_t before = 0;
  int64_t now = 0;
};
// Raises what this process may open to what the system lets it raise it to.
DescriptorLimit RaiseDescriptorLimit();
// What it may open now.
int64_t DescriptorsMax();

}  // namespace attend
