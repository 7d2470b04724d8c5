// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/launch.h"

namespace attend::cuda {

cudaError_t Launch(KernelId kernel, const Attention& attention, void* workspace, int config,
                   cudaStream_t stream) {
  switch (kernel) {
    case KernelId::kCudaNaive:
      if (config != kDefaultConfig && config != 0) return cudaErrorInvalidValue;
      return LaunchNaive(attention, static_cast<float*>(workspace), stream);
    case KernelId::kCudaFlashFp32:
      return LaunchFlashFp32(attention, config, stream);
    default:
      return cudaErrorInvalidDeviceFunction;
  }
}

cudaError_t LoadKernels() {
  const cudaError_t error = LoadFlashFp32();
  return error != cudaSuccess ? error : LoadNaive();
}

}  // namespace attend::cuda
