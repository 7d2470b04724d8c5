// SPDX-License-Identifier: Apache-2.0
//
// How many connections a server accepts, from its settings and its descriptor limit.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"

namespace attend {

struct ConnectionLimits {
  int64_t connections = 0;
  int64_t per_peer = 0;
};

// Descriptors reserved for everything except call and region connections.
inline constexpr int64_t kOtherDescriptors = 64;
// Upper bound of the default, whatever the descriptor limit.
inline constexpr int64_t kDefaultConnectionsMax = 16384;

// Replaces limits that are 0: in total, three quarters of the descriptors that remain after
// `regions` shared-memory connections (metrics, logs and devices need some too); per peer, a
// quarter of that. INVALID_ARGUMENT if `limits` asks for more connections than `descriptors` allow,
// or if `regions` leaves none. Pure.
Result<ConnectionLimits> LimitConnections(ConnectionLimits limits, int64_t descriptors,
                                          int64_t regions);

struct DescriptorLimit {
  int64_t before = 0;
  int64_t now = 0;
};
// Raises the soft descriptor limit to the hard limit.
DescriptorLimit RaiseDescriptorLimit();
// The current soft limit.
int64_t DescriptorsMax();

}  // namespace attend
