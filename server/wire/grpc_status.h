// SPDX-License-Identifier: Apache-2.0
//
// Converts attend::Status to gRPC's and back. Pure.

#pragma once

#include <grpcpp/support/status.h>

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// gRPC sends a status message in a header, whose size peers limit (8 KiB by default).
inline constexpr size_t kStatusMessageBytesMax = 1024;

// At most kStatusMessageBytesMax bytes of `message`, cut between characters and marked if cut.
std::string CutMessage(std::string_view message);

grpc::Status ToGrpc(const Status& status);
Status FromGrpc(const grpc::Status& status);

// Whether a client may retry: RESOURCE_EXHAUSTED and UNAVAILABLE.
bool IsRetryable(Code code);

}  // namespace attend
