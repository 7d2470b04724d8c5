// SPDX-License-Identifier: Apache-2.0
//
// Error reporting of the C functions: they return a code and keep the message for
// attend_client_last_error().

#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "kernels/util/status.h"

namespace attend::client::c {

// Keeps the message for the calling thread, unless the status is OK.
int32_t Return(const Status& status);

// Runs the body of a C function and catches what it throws: RESOURCE_EXHAUSTED for std::bad_alloc,
// INTERNAL for anything else, such as a thread that the system refuses to start.
template <class Function>
int32_t Run(Function function) noexcept {
  try {
    return Return(function());
  } catch (const std::bad_alloc&) {
    return Return(Status(Code::kResourceExhausted, "out of memory"));
  } catch (const std::exception& thrown) {
    return Return(Status(Code::kInternal, thrown.what()));
  }
}

// INVALID_ARGUMENT: `value` is null.
Status NotNull(const char* name, const void* value);

// INVALID_ARGUMENT: the caller was compiled with a struct of another size.
Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected);

}  // namespace attend::client::c
