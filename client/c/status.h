// SPDX-License-Identifier: Apache-2.0
//
// How the C functions report: they return a code and keep the message for
// attend_client_last_error().

#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "kernels/util/status.h"

namespace attend::client::c {

// Keeps the message for the calling thread, unless it is OK's.
int32_t Return(const Status& status);

// What a function of the interface returns. What is thrown on the way ends here, as C has nothing
// to catch it with: RESOURCE_EXHAUSTED if there is no memory, INTERNAL for anything else, such as
// a thread that the system refuses.
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

// INVALID_ARGUMENT: the caller knows a struct of another size than the library.
Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected);

}  // namespace attend::client::c
