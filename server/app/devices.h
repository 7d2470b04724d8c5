// SPDX-License-Identifier: Apache-2.0
//
// Opens the devices that --device names. `auto` serves on every GPU that can be used, and logs
// which ones are left out and why; without one it serves on the CPU. Every other value is an order:
// a device that cannot be used is an error, so that a server never runs on less than it was told
// to.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "server/app/config.h"
#include "server/log/logging.h"

namespace attend {

// Where devices come from: this machine, or a test.
struct DeviceSource {
  std::function<int(std::string* why)> count_gpus = CudaDeviceCount;
  std::function<Result<std::unique_ptr<Backend>>(const std::string& name,
                                                 const BackendOptions& options)>
      open = MakeBackend;
};

struct Devices {
  std::vector<std::unique_ptr<Backend>> backends;  // never empty
  int left_out = 0;                                // GPUs that `auto` found and could not use
};

// An error names the device.
Result<Devices> MakeBackends(const Config& config, Logger& logger, const DeviceSource& source = {});

}  // namespace attend
