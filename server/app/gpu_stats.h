// SPDX-License-Identifier: Apache-2.0
//
// Utilisation, memory and power of the server's GPUs, read from NVML at each scrape. NVML is loaded
// at run time; without it or without GPUs, the families are empty.

#pragma once

#include <prometheus/metric_family.h>

#include <memory>
#include <string>
#include <vector>

namespace attend {

class GpuStats {
 public:
  // `devices`: names such as "cuda:0"; others are ignored.
  explicit GpuStats(const std::vector<std::string>& devices);
  ~GpuStats();

  // On the metrics endpoint's thread.
  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  struct Nvml;
  struct Device {
    std::string name;
    void* handle = nullptr;
  };

  std::unique_ptr<Nvml> nvml_;
  std::vector<Device> devices_;
};

// The machine's GPU that CUDA numbers `index`, from CUDA_VISIBLE_DEVICES (`visible`, null if
// unset): an ordinal or a UUID, as text. Empty if there is none.
std::string VisibleGpu(const char* visible, int index);

}  // namespace attend
