// SPDX-License-Identifier: Apache-2.0
//
// How many connections a server accepts, by its settings and by what the system lets it open.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"

namespace attend {

struct ConnectionLimits {
  int64_t connections = 0;
  int64_t per_peer = 0;
};

// Descriptors that must remain for everything other than connections for calls and for regions.
inline constexpr int64_t kOtherDescriptors = 64;
// By default no server accepts more connections than this, however many descriptors it may open.
inline constexpr int64_t kDefaultConnectionsMax = 16384;

// Fills in limits that are 0: three quarters of the descriptors but for those of `regions`
// connections to shared memory (metrics, logs and devices need some too), and a quarter of that for
// one peer. An error if `limits` asks for more connections than `descriptors` allow, or if they
// allow none. Pure.
Result<ConnectionLimits> LimitConnections(ConnectionLimits limits, int64_t descriptors,
                                          int64_t regions);

struct DescriptorLimit {
  int64_t before = 0;
  int64_t now = 0;
};
// Raises this process's descriptor limit as far as the system allows.
DescriptorLimit RaiseDescriptorLimit();
// How many descriptors it may open now.
int64_t DescriptorsMax();

}  // namespace attend
