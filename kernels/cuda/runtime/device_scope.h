// SPDX-License-Identifier: Apache-2.0
//
// Temporarily changes the current device. Any thread.

#pragma once

#include <cuda_runtime_api.h>

namespace attend::cuda {

// Makes `device` the calling thread's current device, and restores the previous one when destroyed.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
    if (error_ != cudaSuccess) (void)cudaGetLastError();
  }
  ~DeviceScope() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = -1;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace attend::cuda
