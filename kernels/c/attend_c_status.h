// SPDX-License-Identifier: Apache-2.0
//
// How the C functions report: a code for the caller, the words kept for attend_last_error().

#pragma once

#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// Keeps the message for the calling thread, unless it is OK's.
int32_t Return(const Status& status);

// What attend_last_error() says from now on, though the call succeeds.
void SetLastError(std::string message);

}  // namespace attend
