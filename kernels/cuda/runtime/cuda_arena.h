// SPDX-License-Identifier: Apache-2.0
//
// Long-lived GPU memory (DeviceArena). Host code; any thread.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/contract/backend.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/util/status.h"

namespace attend::cuda {

class CudaArena : public DeviceArena {
 public:
  // `device` and `poller`, which learns of a lost device, must outlive it.
  static Result<std::unique_ptr<DeviceArena>> Make(const DeviceInfo& device,
                                                   CompletionPoller& poller, int64_t bytes);
  ~CudaArena() override;
  HostSpan memory() const override { return memory_; }
  bool on_host() const override { return false; }
  Status Copy(std::span<const HostPiece> pieces) override;

 private:
  CudaArena(const DeviceInfo& device, CompletionPoller& poller)
      : device_(device), poller_(poller) {}
  Status Note(cudaError_t error, const char* what);

  const DeviceInfo& device_;
  CompletionPoller& poller_;
  HostSpan memory_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace attend::cuda
