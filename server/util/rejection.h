// SPDX-License-Identifier: Apache-2.0
//
// Why a request or a call was refused before it was accepted. A status carries its reason from
// where it is made; where it carries none, its code says enough.

#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "kernels/util/status.h"

namespace attend {

enum class Rejection : uint8_t {
  kNone = 0,
  kCounted,        // when its caller was refused; or there is nothing to count
  kInvalid,        // bad input
  kUnimplemented,  // valid, no kernel for it
  kMemory,         // no host memory within the budget
  kQueueFull,
  kChecks,  // too many wait for their check
  kDraining,
  kDeadlinePassed,  // already past on arrival
  kTooLarge,        // message above the limit
  kUnknownMethod,
  kSessions,  // no room for a session, or for what it would hold
  kRegions,   // its tenant has as many regions of the Open Inference Protocol as it may
  // About callers (server/auth):
  kNoCredentials,
  kUnknownCaller,
  kExpired,
  kCleartextToken,
  kOtherTenant,
  kNoScope,
  kTenantLimit,  // its tenant has as much as it may (server/limits)
  kLate,         // could not be answered before its deadline
};
inline constexpr int kRejectionCount = 21;

// A status that says why.
inline Status Because(Rejection why, Status status) {
  status.set_reason(static_cast<uint8_t>(why));
  return status;
}
inline Status ResourceExhausted(Rejection why, std::string message) {
  return Because(why, ResourceExhausted(std::move(message)));
}

// How everything that is new is refused while the server drains.
inline Status Draining() {
  return Because(Rejection::kDraining, Unavailable("the server is draining"));
}

// Why it refuses; kNone: it is OK, or a failure that is no refusal.
Rejection RejectionOf(const Status& status);

}  // namespace attend
