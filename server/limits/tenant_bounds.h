// SPDX-License-Identifier: Apache-2.0
//
// The bounds of each tenant, parsed from the file of --limits: one section per tenant; keys before
// the first section are defaults for all.
//
//   requests-in-flight = 64
//   bytes-per-second = "1GiB"
//
//   [research]
//   requests-in-flight = none
//   gflop-per-second = 2000
//
// The syntax is the subset of TOML and INI that --config accepts too. Pure.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/status.h"
#include "server/limits/token_bucket.h"

namespace attend {

enum class Limit {
  kInFlight = 0,   // requests admitted and not yet answered
  kBytes,          // per second: tensor bytes of requests and answers
  kCost,           // per second: FLOPs of cost (kernels/contract/cost.h)
  kChecks,         // requests in flight with a reference check
  kSessionMemory,  // bytes of pages per device
  kStreams,        // streaming calls open between requests
  kSharedMemory,   // bytes of regions in host memory (server/regions)
  kConnections,    // open connections with a call of the tenant (connection_holds.h)
  kSessions,
  kSmallCalls,  // calls without tensors that are not yet answered
};
inline constexpr int kLimitCount = 10;
inline constexpr std::array<Limit, kLimitCount> kLimits = {
    Limit::kInFlight,      Limit::kBytes,     Limit::kCost,         Limit::kChecks,
    Limit::kSessionMemory, Limit::kStreams,   Limit::kSharedMemory, Limit::kConnections,
    Limit::kSessions,      Limit::kSmallCalls};

// The name in the file and in messages ("requests-in-flight"), and as a metric's label
// ("in_flight").
std::string_view LimitKey(Limit limit);
std::string_view LimitLabel(Limit limit);

inline constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The default for small calls in flight: more than a client that waits for its answers needs, yet
// few enough that other tenants' calls queued behind them are answered soon.
inline constexpr int64_t kSmallCallsDefault = 256;

struct TenantBounds {
  // The maximum of each limit that is not a rate, indexed by Limit; unused for rates.
  std::array<int64_t, kLimitCount> most;
  Rate bytes;
  Rate cost;

  TenantBounds() {
    most.fill(kUnlimited);
    (*this)[Limit::kSmallCalls] = kSmallCallsDefault;
  }
  int64_t& operator[](Limit limit) { return most[static_cast<size_t>(limit)]; }
  int64_t operator[](Limit limit) const { return most[static_cast<size_t>(limit)]; }
  bool operator==(const TenantBounds&) const = default;
};

// The maximum size of the file, in bytes.
inline constexpr int64_t kLimitsBytesMax = int64_t{1} << 20;

// The bounds of `tenants`, in the same order. INVALID_ARGUMENT names the line, the section, the
// key, the value and what is allowed.
Result<std::vector<TenantBounds>> ParseLimits(std::string_view text,
                                              std::span<const std::string> tenants);

}  // namespace attend
