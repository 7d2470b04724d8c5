// SPDX-License-Identifier: Apache-2.0
//
// Why a request or a call was refused before it was accepted. A status carries its reason from
// where it is made; without one, its code determines it.

#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "kernels/util/status.h"

namespace attend {

enum class Rejection : uint8_t {
  kNone = 0,
  kCounted,        // already counted when the caller was refused, or nothing to count
  kInvalid,        // bad input
  kUnimplemented,  // valid, but no kernel supports it
  kMemory,         // no host memory left in the budget
  kQueueFull,
  kChecks,  // too many answers wait for their check
  kDraining,
  kDeadlinePassed,  // had passed on arrival
  kTooLarge,        // message above the limit
  kUnknownMethod,
  kSessions,  // no room for a session, or for its pages
  kRegions,   // the tenant has its maximum of Open Inference Protocol regions
  // About callers (server/auth):
  kNoCredentials,
  kUnknownCaller,
  kExpired,
  kCleartextToken,
  kOtherTenant,
  kNoScope,
  kTenantLimit,  // the tenant is at a limit (server/limits)
  kLate,         // could not be answered before its deadline
};
inline constexpr int kRejectionCount = 21;

// A status with its reason.
inline Status Because(Rejection why, Status status) {
  status.set_reason(static_cast<uint8_t>(why));
  return status;
}
inline Status ResourceExhausted(Rejection why, std::string message) {
  return Because(why, ResourceExhausted(std::move(message)));
}

// The refusal of everything new while the server drains.
inline Status Draining() {
  return Because(Rejection::kDraining, Unavailable("the server is draining"));
}

// The reason of a refusal; kNone: OK, or a failure that is not a refusal.
Rejection RejectionOf(const Status& status);

}  // namespace attend
