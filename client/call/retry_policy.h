// SPDX-License-Identifier: Apache-2.0
//
// When a failed call is tried again. Pure: time comes in as numbers and randomness as a generator,
// so tests drive it with a manual clock. Each call owns its RetryState.

#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "client/call/random.h"
#include "kernels/util/status.h"

namespace attend::client {

struct RetryPolicy {
  int attempts_max = 5;  // the first one included; 1 = never retry
  std::chrono::nanoseconds backoff_initial = std::chrono::milliseconds(20);
  std::chrono::nanoseconds backoff_max = std::chrono::seconds(2);
  double backoff_multiplier = 2.0;
  double jitter = 0.2;  // each wait is multiplied by a uniform draw from [1 - jitter, 1 + jitter]
};

// What the server said with the failure in the trailing metadata "grpc-retry-pushback-ms".
struct Pushback {
  enum class Kind { kNone, kWait, kNever } kind = Kind::kNone;
  std::chrono::nanoseconds wait{0};
};

// Reads the metadata's value: a number of milliseconds; a negative or malformed one means "never".
Pushback ParsePushback(std::optional<std::string_view> value);

class RetryState {
 public:
  RetryState(const RetryPolicy& policy, uint64_t seed) : policy_(policy), random_(seed) {}

  // Called once for every failed attempt. How long to wait before the next one, or nothing if the
  // failure is final: a code other than UNAVAILABLE and RESOURCE_EXHAUSTED, the latter without a
  // time from the server (gRPC says it of what is too large, which never changes), no attempts
  // left, the server said never, or the wait would not end before `time_left` (nullopt = no
  // deadline).
  // A wait that the server asked for is never shortened and starts the backoff anew.
  std::optional<std::chrono::nanoseconds> AfterFailure(
      Code code, const Pushback& pushback, std::optional<std::chrono::nanoseconds> time_left);

  int attempts() const { return failures_ + 1; }

 private:
  RetryPolicy policy_;
  Random random_;
  int failures_ = 0;
  int backoffs_ = 0;  // since the last pushback
};

}  // namespace attend::client
