// SPDX-License-Identifier: Apache-2.0
//
// What a GPU does of one attention without any server: its kernel, launched again and again by one
// process over memory of the device. For one thread.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tests/bench/service/rounds.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {

class DeviceLoop {
 public:
  // "cuda:N", and the kernel that is selected there. UNIMPLEMENTED in a build without CUDA.
  static Result<std::unique_ptr<DeviceLoop>> Make(const std::string& device,
                                                  const test::ProblemSpec& spec, uint64_t seed);
  virtual ~DeviceLoop() = default;
  // For `seconds`, some launches at least.
  virtual Result<Sample> Drive(double seconds) = 0;
};

}  // namespace attend::bench
