// SPDX-License-Identifier: Apache-2.0
//
// How a status is told to a client. Pure.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// gRPC sends a status message in a header, whose size peers limit (8 KiB by default).
inline constexpr size_t kStatusMessageBytesMax = 1024;

// At most kStatusMessageBytesMax bytes of `message`, cut between characters and marked if cut.
std::string CutMessage(std::string_view message);

// Whether a client may retry: RESOURCE_EXHAUSTED and UNAVAILABLE.
bool IsRetryable(Code code);

}  // namespace attend
