// SPDX-License-Identifier: Apache-2.0
//
// Opens the devices of --device. `auto` serves on every usable GPU and logs which ones it leaves
// out and why; without any it serves on the CPU. All other values are strict: an unusable device is
// an error, so that a server never runs on fewer devices than requested.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "server/app/config.h"
#include "server/log/logging.h"

namespace attend {

// Where devices come from; tests replace it.
struct DeviceSource {
  std::function<int(std::string* why)> count_gpus = CudaDeviceCount;
  std::function<Result<std::unique_ptr<Backend>>(const std::string& name,
                                                 const BackendOptions& options)>
      open = MakeBackend;
};

struct Devices {
  std::vector<std::unique_ptr<Backend>> backends;  // never empty
  int left_out = 0;                                // GPUs that `auto` found unusable
};

// An error names the device.
Result<Devices> MakeBackends(const Config& config, Logger& logger, const DeviceSource& source = {});

}  // namespace attend
