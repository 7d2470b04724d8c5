// SPDX-License-Identifier: Apache-2.0
//
// Converts the C structs to the library's own and validates everything that needs no device.

#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "kernels/c/attend_c.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend::c {

// INVALID_ARGUMENT: `value` is outside of [low, high].
Status CheckRange(const char* field, int64_t value, int64_t low, int64_t high);

// INVALID_ARGUMENT: a stride between packed sequences is not 0.
Status CheckPackedStrides(std::initializer_list<std::pair<const char*, int64_t>> strides);

// INVALID_ARGUMENT: the caller was built against another version of the struct.
Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected);

// Reads and validates the problem that `params`, which may be null, describes.
Status ReadProblem(const attend_params* params, Problem* problem);

// INVALID_ARGUMENT: required memory is null.
Status CheckMemory(const attend_params& params, const Problem& problem);

// A dimension of an output tensor.
struct Dimension {
  int64_t size = 0;
  int64_t stride = 0;
};

// INVALID_ARGUMENT: elements of the tensor may overlap, because a stride is smaller than the span
// of the smaller strides. Conservative: strides of 2 and 3 with 2 elements each do not overlap, but
// are refused. `outer` are all dimensions but the last, which has `columns` contiguous elements.
Status CheckDistinct(const char* name, const std::array<Dimension, 3>& outer, int64_t columns);

// INVALID_ARGUMENT: O or LSE may overlap itself.
Status CheckOutputs(const attend_params& params, const Problem& problem);

// The problem with its memory, unchecked.
Attention ReadAttention(const attend_params& params, const Problem& problem);

// INVALID_ARGUMENT: smaller than `needed` bytes, or not aligned.
Status CheckWorkspace(const void* workspace, int64_t bytes, int64_t needed);

}  // namespace attend::c
