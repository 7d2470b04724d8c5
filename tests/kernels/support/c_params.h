// SPDX-License-Identifier: Apache-2.0
//
// From the C++ description of a backward pass to the C one. Any thread.

#pragma once

#include <cstdint>

#include "kernels/c/attend_c.h"
#include "kernels/c/params_of.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"

namespace attend::test {

attend_backward_params ToParams(const Attention& attention, const Gradients& gradients);

// `data` as far into `block_to` as it lies in `block_from`; NULL stays NULL.
template <class T>
T* Moved(T* data, const void* block_from, const void* block_to) {
  if (data == nullptr) return nullptr;
  const auto from = reinterpret_cast<uintptr_t>(block_from);
  const auto to = reinterpret_cast<uintptr_t>(block_to);
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(data) - from + to);
}

}  // namespace attend::test
