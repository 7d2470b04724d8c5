// SPDX-License-Identifier: Apache-2.0
//
// From the C structs to the library's own, with everything checked that needs no device.

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

// INVALID_ARGUMENT: one of the strides from sequence to sequence is not 0.
Status CheckPackedStrides(std::initializer_list<std::pair<const char*, int64_t>> strides);

// INVALID_ARGUMENT: the caller knows a struct of another size than the library.
Status CheckStructBytes(const char* name, uint64_t bytes, uint64_t expected);

// What `params`, which may be null, says of the problem, checked.
Status ReadProblem(const attend_params* params, Problem* problem);

// INVALID_ARGUMENT: memory that the problem needs is null.
Status CheckMemory(const attend_params& params, const Problem& problem);

// A dimension of a tensor that is written.
struct Dimension {
  int64_t size = 0;
  int64_t stride = 0;
};

// INVALID_ARGUMENT: elements of the tensor may share a place: a stride steps over less than the
// smaller ones reach. (Some such do not, as strides of 2 and 3 for 2 elements each.) `outer` are
// its dimensions but the last one, which has `columns` contiguous elements.
Status CheckDistinct(const char* name, const std::array<Dimension, 3>& outer, int64_t columns);

// INVALID_ARGUMENT: O or LSE may overlap itself.
Status CheckOutputs(const attend_params& params, const Problem& problem);

// The problem with its memory, as it was given.
Attention ReadAttention(const attend_params& params, const Problem& problem);

// INVALID_ARGUMENT: too small for `needed` bytes, or not aligned.
Status CheckWorkspace(const void* workspace, int64_t bytes, int64_t needed);

}  // namespace attend::c
