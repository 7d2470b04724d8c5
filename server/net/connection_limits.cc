// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <string>

namespace attend {
namespace {

// Clamps RLIM_INFINITY as well.
int64_t Count(rlim_t limit) {
  return static_cast<int64_t>(std::min<rlim_t>(limit, rlim_t{1} << 30));
}

}  // namespace

Result<ConnectionLimits> LimitConnections(ConnectionLimits limits, int64_t descriptors,
                                          int64_t regions) {
  const int64_t left = descriptors - regions;
  if (regions > 0 && left <= kOtherDescriptors) {
    return InvalidArgument(
        "shared-memory reserves " + std::to_string(regions) +
        " descriptors for its connections, so that the process must be able to open more than " +
        std::to_string(regions + kOtherDescriptors) + ", but may open " +
        std::to_string(descriptors) + " (ulimit -n)");
  }
  const int64_t most = std::max<int64_t>(1, left - kOtherDescriptors);
  if (limits.connections > most) {
    return InvalidArgument("max-connections is " + std::to_string(limits.connections) +
                           ", must be at most " + std::to_string(most) + ": the process may open " +
                           std::to_string(descriptors) + " descriptors (ulimit -n)" +
                           (regions > 0 ? ", " + std::to_string(regions) +
                                              " of them reserved for connections to shared memory"
                                        : ""));
  }
  if (limits.connections == 0) {
    limits.connections =
        std::clamp<int64_t>(left / 4 * 3, 1, std::min(most, kDefaultConnectionsMax));
  }
  if (limits.per_peer == 0) limits.per_peer = (limits.connections + 3) / 4;
  limits.per_peer = std::min(limits.per_peer, limits.connections);
  return limits;
}

DescriptorLimit RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  const int64_t before = Count(limit.rlim_cur);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  return {before, DescriptorsMax()};
}

int64_t DescriptorsMax() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? Count(limit.rlim_cur) : 0;
}

}  // namespace attend
