// SPDX-License-Identifier: Apache-2.0
//
// Rounds a double to a dtype, once.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/contract/dtype.h"

namespace attend {

// Stores the value of `dtype` nearest to a double as element `index`. Rounding through float would
// round twice, so the float is rounded to odd: its last bit then records that something was cut
// off.
inline void StoreRounded(void* data, DType dtype, int64_t index, double value) {
  if (dtype == DType::kFloat64) {
    static_cast<double*>(data)[index] = value;
    return;
  }
  float narrow = static_cast<float>(value);
  if (dtype != DType::kFloat32 && std::isfinite(narrow) && static_cast<double>(narrow) != value) {
    if ((std::bit_cast<uint32_t>(narrow) & 1u) == 0) {
      constexpr float kUp = std::numeric_limits<float>::infinity();
      narrow = std::nextafter(narrow, static_cast<double>(narrow) < value ? kUp : -kUp);
    }
  }
  StoreElement(data, dtype, index, narrow);
}

}  // namespace attend
