// SPDX-License-Identifier: Apache-2.0
//
// A CUDA event that an item of a batch waits for.

#pragma once

#include <cuda_runtime_api.h>

#include "kernels/contract/backend.h"

namespace attend::cuda {

// Owns the event. An item waits for the last recording before it is submitted, from any process. If
// the event was never recorded, the item does not wait.
class CudaEvent final : public DeviceEvent {
 public:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  ~CudaEvent() override { (void)cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  const cudaEvent_t event_;
};

}  // namespace attend::cuda
