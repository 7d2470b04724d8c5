// SPDX-License-Identifier: Apache-2.0
//
// The rules for a request's sequence lengths and offsets.

#pragma once

#include <string>
#include <string_view>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"
#include "server/wire/wire_arrays.h"

namespace attend {

// Checks the lengths against a problem whose shapes are known. Sets the batch and the maximum
// lengths of a packed problem.
Status CheckLengths(const WireArrays& arrays, Problem& problem);

// INVALID_ARGUMENT: `field` has the wrong number of entries; `bound` describes the right one.
Status WrongCount(std::string_view field, int64_t entries, const std::string& bound);

}  // namespace attend
