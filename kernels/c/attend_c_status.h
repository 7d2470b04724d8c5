// SPDX-License-Identifier: Apache-2.0
//
// How the C functions report: they return a code and keep the message for attend_last_error().

#pragma once

#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// Keeps the message for the calling thread, unless it is OK's.
int32_t Return(const Status& status);

// Sets what attend_last_error() says from now on, although the call succeeds.
void SetLastError(std::string message);

}  // namespace attend
