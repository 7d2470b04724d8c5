// SPDX-License-Identifier: Apache-2.0

#include "kernels/contract/dropout.h"

#include <cmath>
#include <string>

#include "kernels/util/counted.h"

namespace attend {

Result<int32_t> DropoutSteps(std::string_view field, double p) {
  if (!(p >= 0.0 && p < 1.0 - 0x1p-17)) {
    return InvalidArgument(std::string(field) + " is " + NumberText(p) +
                           ", must be in [0, 1 - 2^-17)");
  }
  return static_cast<int32_t>(std::nearbyint(p * kDropoutOne));
}

}  // namespace attend
