// SPDX-License-Identifier: Apache-2.0
//
// device_loop.h in a build without CUDA.

#include "tests/bench/service/device_loop.h"

namespace attend::bench {

Result<std::unique_ptr<DeviceLoop>> DeviceLoop::Make(const std::string&, const test::ProblemSpec&,
                                                     uint64_t) {
  return Unimplemented("this build has no CUDA");
}

}  // namespace attend::bench
