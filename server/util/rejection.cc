// SPDX-License-Identifier: Apache-2.0

#include "server/util/rejection.h"

namespace attend {

Rejection RejectionOf(const Status& status) {
  if (status.reason() != 0) return static_cast<Rejection>(status.reason());
  switch (status.code()) {
    case Code::kResourceExhausted:
      return Rejection::kMemory;
    case Code::kInvalidArgument:
    case Code::kNotFound:  // sessions
    case Code::kOutOfRange:
    case Code::kFailedPrecondition:
      return Rejection::kInvalid;
    // Sessions without the scope, or a file that does not belong to the client.
    case Code::kPermissionDenied:
      return Rejection::kNoScope;
    case Code::kUnimplemented:
      return Rejection::kUnimplemented;
    default:
      return Rejection::kNone;
  }
}

}  // namespace attend
