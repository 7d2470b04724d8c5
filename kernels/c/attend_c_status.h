// SPDX-License-Identifier: Apache-2.0
//
// Error reporting of the C functions: they return a code and store the message for
// attend_last_error().

#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// Returns the status's code; stores the message for the calling thread unless OK.
int32_t Return(const Status& status);

// Runs the body of a C function and catches what it throws: RESOURCE_EXHAUSTED for std::bad_alloc,
// INTERNAL for anything else, such as a thread that the system refuses to start.
template <class Function>
int32_t Run(Function function) noexcept {
  try {
    return Return(function());
  } catch (const std::bad_alloc&) {
    return Return(ResourceExhausted("out of memory"));  // short enough to take none
  } catch (const std::exception& thrown) {
    return Return(Internal(thrown.what()));
  }
}

// Sets the result of attend_last_error() even though the call succeeds.
void SetLastError(std::string message);

}  // namespace attend
