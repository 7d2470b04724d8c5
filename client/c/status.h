// SPDX-License-Identifier: Apache-2.0
//
// How the C functions report: they return a code and keep the message for
// attend_client_last_error().

#pragma once

#include <cstdint>

#include "kernels/util/status.h"

namespace attend::client::c {

// Keeps the message for the calling thread, unless it is OK's.
int32_t Return(const Status& status);

// INVALID_ARGUMENT: `value` is null.
Status NotNull(const char* name, const void* value);

// INVALID_ARGUMENT: the caller knows a struct of another size than the library.
Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected);

}  // namespace attend::client::c
