// SPDX-License-Identifier: Apache-2.0
//
// For values that are kept where they are needed: ATTEND_RETURN_IF_ERROR(Assign(kept_, Make())).

#pragma once

#include <utility>

#include "kernels/util/status.h"

namespace attend {

// Moves the result's value to `to`, unless it is an error.
template <class To, class From>
Status Assign(To& to, Result<From> result) {
  if (result.ok()) to = *std::move(result);
  return result.status();
}

}  // namespace attend
