// SPDX-License-Identifier: Apache-2.0
//
// What one tenant may take, as the file of --limits says it: one section for each tenant, and what
// stands before the first section holds for all that do not say otherwise.
//
//   requests-in-flight = 64
//   bytes-per-second = "1GiB"
//
//   [research]
//   requests-in-flight = none
//   gflop-per-second = 2000
//
// The syntax is the part of TOML and INI that --config takes too. Pure.

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
  kBytes,          // a second: of tensors, in requests and answers
  kCost,           // a second: FLOPs of cost (kernels/contract/cost.h)
  kChecks,         // requests in flight that asked for a reference check
  kSessionMemory,  // bytes of pages, on each device
  kStreams,        // calls that stay open between requests
  kSharedMemory,   // bytes of regions in host memory (server/regions)
  kConnections,    // open ones over which its callers have called (connection_holds.h)
  kSessions,
  kSmallCalls,  // calls without tensors that are not yet answered
};
inline constexpr int kLimitCount = 10;
inline constexpr std::array<Limit, kLimitCount> kLimits = {
    Limit::kInFlight,      Limit::kBytes,     Limit::kCost,         Limit::kChecks,
    Limit::kSessionMemory, Limit::kStreams,   Limit::kSharedMemory, Limit::kConnections,
    Limit::kSessions,      Limit::kSmallCalls};

// As the file and messages name it: "requests-in-flight"; and as a metric's label: "in_flight".
std::string_view LimitKey(Limit limit);
std::string_view LimitLabel(Limit limit);

inline constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The default bound of small calls in flight: more than a client that waits for its answers has at
// once, and few enough that other tenants' calls behind them are answered soon.
inline constexpr int64_t kSmallCallsDefault = 256;

struct TenantBounds {
  // The most of each limit that is no rate, by Limit; of a rate, unused.
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

// The most bytes and lines that a file may have.
inline constexpr int64_t kLimitsBytesMax = int64_t{1} << 20;

// The bounds of each of `tenants`, in their order. INVALID_ARGUMENT names the line, the section,
// the key, the value and what it must be.
Result<std::vector<TenantBounds>> ParseLimits(std::string_view text,
                                              std::span<const std::string> tenants);

}  // namespace attend
