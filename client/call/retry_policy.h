// SPDX-License-Identifier: Apache-2.0
//
// Decides when a failed call is retried. Pure: time comes in as numbers and randomness as a seed,
// so tests drive it with a manual clock. Each call owns its RetryState. One rule is elsewhere: a
// call whose answer is placed in shared memory is retried only with a pushback time from the server
// (UnaryOp::TriesAgain).

#pragma once

#include <cassert>
#include <chrono>
#include <cstdint>
#include <optional>

#include "client/call/random.h"
#include "kernels/util/status.h"

namespace attend::client {

struct RetryPolicy {
  int attempts_max = 5;  // including the first; 1: never retry
  std::chrono::nanoseconds backoff_initial = std::chrono::milliseconds(20);
  std::chrono::nanoseconds backoff_max = std::chrono::seconds(2);
  double backoff_multiplier = 2.0;
  double jitter = 0.2;  // backoff times uniform [1 - jitter, 1 + jitter]; pushback: [1, 1 + jitter]
};

// The trailing metadata "grpc-retry-pushback-ms" of a failure.
struct Pushback {
  enum class Kind { kNone, kWait, kNever } kind = Kind::kNone;
  std::chrono::nanoseconds wait{0};
};

// Longer waits are cut to this, so that a faulty server's wait does not look like a hang.
inline constexpr std::chrono::seconds kPushbackMax{60};

// Reads the metadata's value: a number of milliseconds; a negative or malformed one means "never".
Pushback ParsePushback(std::optional<std::string_view> value);

class RetryState {
 public:
  RetryState(const RetryPolicy& policy, uint64_t seed) : policy_(policy), random_(seed) {
    assert(policy.attempts_max >= 1);
  }

  // Must be called once per failed attempt. Returns the wait before the next one, or nothing if the
  // failure is final: the code is neither UNAVAILABLE nor RESOURCE_EXHAUSTED; it is
  // RESOURCE_EXHAUSTED without a pushback time (gRPC uses that for messages that are too large,
  // where a retry cannot help); no attempts are left; the server said never; or the wait would not
  // end before `time_left` (nullopt: no deadline). A pushback time is shortened only to
  // kPushbackMax, jitter only lengthens it, and it restarts the backoff.
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
