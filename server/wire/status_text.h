// SPDX-License-Identifier: Apache-2.0
//
// Status messages as sent to clients. Pure.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// gRPC sends a status message in a header, whose size peers limit (8 KiB by default).
inline constexpr size_t kStatusMessageBytesMax = 1024;

// `message`, truncated between characters to kStatusMessageBytesMax bytes and marked if truncated.
std::string CutMessage(std::string_view message);

// Whether a client may retry: RESOURCE_EXHAUSTED and UNAVAILABLE.
bool IsRetryable(Code code);

}  // namespace attend
