// SPDX-License-Identifier: Apache-2.0

#include "server/app/gpu_stats.h"

#include <dlfcn.h>

#include <cstdlib>
#include <sstream>

#include "server/metrics/make_family.h"

namespace attend {
namespace {

// Structs of NVML's stable C interface.
struct Utilization {
  unsigned gpu;
  unsigned memory;
};
struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

constexpr int kSuccess = 0;

}  // namespace

struct GpuStats::Nvml {
  void* library = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_index)(unsigned, void**) = nullptr;
  int (*by_uuid)(const char*, void**) = nullptr;
  int (*utilization)(void*, Utilization*) = nullptr;
  int (*memory)(void*, Memory*) = nullptr;
  int (*power)(void*, unsigned*) = nullptr;
  bool running = false;

  ~Nvml() {
    if (running) shutdown();
    if (library != nullptr) dlclose(library);
  }

  bool Start() {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const bool found = Find("nvmlInit_v2", init) && Find("nvmlShutdown", shutdown) &&
                       Find("nvmlDeviceGetHandleByIndex_v2", by_index) &&
                       Find("nvmlDeviceGetHandleByUUID", by_uuid) &&
                       Find("nvmlDeviceGetUtilizationRates", utilization) &&
                       Find("nvmlDeviceGetMemoryInfo", memory) &&
                       Find("nvmlDeviceGetPowerUsage", power);
    running = found && init() == kSuccess;
    return running;
  }

  template <class Function>
  bool Find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    return function != nullptr;
  }
};

std::string VisibleGpu(const char* visible, int index) {
  if (visible == nullptr) return std::to_string(index);
  std::istringstream list(visible);
  std::string entry;
  for (int i = 0; std::getline(list, entry, ','); ++i) {
    if (i == index) return entry;
  }
  return {};
}

GpuStats::GpuStats(const std::vector<std::string>& devices) : nvml_(std::make_unique<Nvml>()) {
  constexpr std::string_view kCuda = "cuda:";
  for (const std::string& name : devices) {
    if (!name.starts_with(kCuda)) continue;
    if (!nvml_->running && !nvml_->Start()) return;
    const int index = std::atoi(name.c_str() + kCuda.size());
    const std::string gpu = VisibleGpu(std::getenv("CUDA_VISIBLE_DEVICES"), index);
    if (gpu.empty()) continue;
    Device device{name, nullptr};
    const bool ordinal = gpu.find_first_not_of("0123456789") == gpu.npos;
    const int result =
        ordinal ? nvml_->by_index(static_cast<unsigned>(std::atoi(gpu.c_str())), &device.handle)
                : nvml_->by_uuid(gpu.c_str(), &device.handle);
    if (result == kSuccess) devices_.push_back(std::move(device));
  }
}

GpuStats::~GpuStats() = default;

std::vector<prometheus::MetricFamily> GpuStats::Collect() const {
  MetricFamilies families = {
      EmptyFamily(kGauges, "attend_gpu_utilization_ratio",
                  "Share of time during which a kernel ran, from NVML"),
      EmptyFamily(kGauges, "attend_gpu_memory_used_bytes",
                  "Device memory in use by all processes, from NVML"),
      EmptyFamily(kGauges, "attend_gpu_power_watts", "Power drawn by the GPU, from NVML")};
  const auto add = [&families](int family, const std::string& device, double value) {
    AddMetric(families[family], {{"device", device}}, value);
  };
  for (const Device& device : devices_) {
    Utilization utilization{};
    if (nvml_->utilization(device.handle, &utilization) == kSuccess) {
      add(0, device.name, utilization.gpu / 100.0);
    }
    Memory memory{};
    if (nvml_->memory(device.handle, &memory) == kSuccess) {
      add(1, device.name, static_cast<double>(memory.used));
    }
    unsigned milliwatts = 0;
    if (nvml_->power(device.handle, &milliwatts) == kSuccess) {
      add(2, device.name, milliwatts / 1000.0);
    }
  }
  return families;
}

}  // namespace attend
