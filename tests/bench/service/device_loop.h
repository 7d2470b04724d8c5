// SPDX-License-Identifier: Apache-2.0
//
// The rate of a GPU without a server: a process launches the kernel of an attention repeatedly, on
// device memory. For one thread.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tests/bench/service/rounds.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {

class DeviceLoop {
 public:
  // `device` is "cuda:N"; runs the kernel that is selected there. UNIMPLEMENTED in a build without
  // CUDA.
  static Result<std::unique_ptr<DeviceLoop>> Make(const std::string& device,
                                                  const test::ProblemSpec& spec, uint64_t seed);
  virtual ~DeviceLoop() = default;
  // Runs for `seconds`, with at least a few launches.
  virtual Result<Sample> Drive(double seconds) = 0;
};

}  // namespace attend::bench
