// SPDX-License-Identifier: Apache-2.0

#include "server/app/devices.h"

#include <algorithm>
#include <utility>

#include "server/app/config_values.h"
#include "server/app/options.h"

namespace attend {
namespace {

using Backends = std::vector<std::unique_ptr<Backend>>;

// Checks that the engine's lanes can be made: a GPU may open, yet have no memory left for them
// because other processes use it.
Status TryLanes(Backend& backend, const Config& config) {
  const EngineOptions options = MakeEngineOptions(config, /*gpu=*/true);
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int i = 0; i < std::max(1, options.worker.lanes); ++i) {
    Result<std::unique_ptr<Lane>> lane = backend.MakeLane(options.worker.lane);
    if (!lane.ok()) return lane.status();
    lanes.push_back(std::move(*lane));
  }
  return Status();
}

Result<std::unique_ptr<Backend>> OpenUsable(const std::string& name, const Config& config,
                                            const BackendOptions& options,
                                            const DeviceSource& source) {
  Result<std::unique_ptr<Backend>> backend = source.open(name, options);
  if (!backend.ok()) return backend.status();
  ATTEND_RETURN_IF_ERROR(TryLanes(**backend, config));
  return backend;
}

std::vector<std::string> GpuNames(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back("cuda:" + std::to_string(i));
  return names;
}

Backends UsableGpus(int count, const Config& config, const BackendOptions& options, Logger& logger,
                    const DeviceSource& source) {
  Backends backends;
  for (const std::string& name : GpuNames(count)) {
    Result<std::unique_ptr<Backend>> backend = OpenUsable(name, config, options, source);
    if (backend.ok()) {
      backends.push_back(std::move(*backend));
    } else {
      logger.Log(LogLevel::warn, "device left out",
                 {{"device", name}, {"error", backend.status().message()}}, name);
    }
  }
  return backends;
}

}  // namespace

Result<Devices> MakeBackends(const Config& config, Logger& logger, const DeviceSource& source) {
  BackendOptions options;
  options.cpu_threads = static_cast<int>(config.cpu_threads);
  std::string why;
  int left_out = 0;
  std::vector<std::string> names;
  if (config.device == "auto") {
    const int gpus = source.count_gpus(&why);
    Backends backends = UsableGpus(gpus, config, options, logger, source);
    left_out = gpus - static_cast<int>(backends.size());
    if (!backends.empty()) return Devices{std::move(backends), left_out};
    if (gpus == 0) {
      logger.info("no GPU found: {}; serving on the CPU", why);
    } else {
      logger.warn("none of {} GPUs can be used; serving on the CPU", gpus);
    }
    names = {"cpu"};
  } else if (config.device == "cuda:all") {
    names = GpuNames(source.count_gpus(&why));
    if (names.empty()) return Status(Code::kNotFound, "device cuda:all: " + why);
  } else {
    names = Split(config.device);
  }
  Backends backends;
  for (const std::string& name : names) {
    Result<std::unique_ptr<Backend>> backend = source.open(name, options);
    if (!backend.ok() && config.device == "cuda:all") {
      return Status(backend.status().code(),
                    backend.status().message() + " (--device auto leaves such GPUs out)");
    }
    if (!backend.ok()) return backend.status();
    backends.push_back(std::move(*backend));
  }
  return Devices{std::move(backends), left_out};
}

}  // namespace attend
