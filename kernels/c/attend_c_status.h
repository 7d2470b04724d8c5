// SPDX-License-Identifier: Apache-2.0
//
// Error reporting of the C functions: they return a code and store the message for
// attend_last_error().

#pragma once

#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// Returns the status's code; stores the message for the calling thread unless OK.
int32_t Return(const Status& status);

// Sets the result of attend_last_error() even though the call succeeds.
void SetLastError(std::string message);

}  // namespace attend
